"""What a model runs on: frozen records. Data lives in hardware_catalog/, loading in planner.hardware.catalog.

Units: GB = 1e9 bytes, GiB = 2**30 bytes; bandwidths in GB/s (1e9 bytes/s); rates in 1e12 operations/s; prices in USD.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Literal

LinkKind = Literal[
    "none",
    "nvswitch",
    "nvlink-mesh",
    "nvlink-bridge",
    "xgmi-mesh",
    "pcie-p2p",
    "pcie-host",
    "ici",
    "fabric-rdma",
    "fabric-tcp",
    "process-group",
]
Tier = Literal["on_demand", "spot", "reserved", "owned"]


@dataclass(frozen=True)
class KernelFile:
    """A kernel surface of one's own: kernels/<name>.csv of a catalog folder. label: how errors name it."""

    label: str
    text: str


@dataclass(frozen=True)
class Correction:
    """What a prediction is multiplied with after measurement, and the 80% interval around the result, as factors of it."""

    factor: float
    low: float
    high: float
    records: int


@dataclass(frozen=True)
class Gpu:
    """One accelerator as the software sees it (an MI250 is two of these per package).

    peak_tflops: dense rates with fp32 accumulate, by compute dtype (fp32, tf32, fp16, bf16, fp8, int8, fp4);
    a dtype that is absent has no tensor hardware. matmul_tflops: the best rate of a matrix product that was measured, by compute dtype,
    where it is far from the peak (the surface of a relative would promise more). memory_gb is the label, usable_gib what an engine finds.
    default_link: name of the link between several of these in one machine; bridge_link: with an NVLink bridge added.
    unverified: fields whose value no restatable source confirms ('p2p' = peer access over PCIe).
    kernels: its own measured surface, None = packaged or borrowed. measured: constants of the time model that were measured
    on this very device, by name. corrections: of predictions on this GPU, by 'engine/metric' (planner.estimator.corrections).
    cpu_threads: threads of one device where a device is a share of a CPU, None for accelerators.
    """

    name: str
    vendor: Literal["nvidia", "amd", "google", "cpu"]
    architecture: str
    memory_gb: float
    usable_gib: float
    bandwidth_gb_per_s: float
    peak_tflops: dict[str, float]
    compute_capability: float | None
    pcie_gen: int
    tdp_w: float | None
    aliases: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    source: str = ""
    caveat: str = ""
    default_link: str = ""
    bridge_link: str = ""
    kernels: KernelFile | None = None
    measured: dict[str, float] = field(default_factory=dict)
    cpu_threads: int | None = None
    corrections: dict[str, Correction] = field(default_factory=dict)
    matmul_tflops: dict[str, float] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)

    def computes(self, dtype: str) -> bool:
        """True when it has a dense peak for the dtype; bf16 and fp16 stand for each other."""
        names = ("bf16", "fp16") if dtype in ("bf16", "fp16") else (dtype,)
        return any(self.peak_tflops.get(name) for name in names)


@dataclass(frozen=True)
class Link:
    """How GPUs reach each other. bandwidth is per GPU and direction; latency_us is one hop of a small message.

    measured_busbw_gb_per_s: bus bandwidth of a large all-reduce where it was measured, else None.
    per_peer_gb_per_s: most that two GPUs get between them (a mesh splits its bandwidth), None = all of it.
    beyond: link to the other GPUs of the machine when it holds more than max_gpus (NVLink bridges), None = unreachable.
    all_reduce_factor, reduce_scatter_factor: measured time over that of two all-gathers, and over that of one.
    """

    name: str
    kind: LinkKind
    bandwidth_gb_per_s: float
    latency_us: float
    max_gpus: int
    measured_busbw_gb_per_s: float | None = None
    verified: bool = True
    source: str = ""
    per_peer_gb_per_s: float | None = None
    beyond: Link | None = None
    all_reduce_factor: float = 1.0
    reduce_scatter_factor: float = 1.0

    def __hash__(self) -> int:
        return hash((self.name, self.bandwidth_gb_per_s))


@dataclass(frozen=True)
class Instance:
    """A machine one can rent or own: GPUs, host, link inside the node, fabric between nodes.

    link: link between GPUs of the node. fabric: link between nodes (per GPU share of the node's bandwidth), None when
    the machine cannot be clustered or nobody says how. ram_gib and nvme_gb are per machine; None = not stated.
    network_gbit_per_s: all network of the machine. unpriced: why there is no price ('' when there is one).
    """

    provider: str
    name: str
    gpu: Gpu
    gpu_count: int
    link: Link
    fabric: Link | None
    vcpus: int | None
    ram_gib: float | None
    nvme_gb: float | None
    max_count: int | None = None
    caveat: str = ""
    network_gbit_per_s: float | None = None
    unpriced: str = ""

    def __hash__(self) -> int:
        return hash((self.provider, self.name))


@dataclass(frozen=True)
class Price:
    """USD per hour of one instance in one region and tier, as observed on a date. Never 0 unless tier is 'owned'."""

    usd_per_hour: float
    region: str
    tier: Tier
    observed_on: dt.date
    source: str


@dataclass(frozen=True)
class Offer:
    """An instance at a price; quota is the most one may take of it (None = no stated limit)."""

    instance: Instance
    price: Price
    quota: int | None = None

    @property
    def host_ram_gib(self) -> float | None:
        """Host memory that a plan may count on, GiB: what is stated; for a rented machine of which nobody states it, as much as its GPUs
        have; None for an owned one, whose owner knows."""
        i = self.instance
        if i.ram_gib is not None or self.price.tier == "owned":
            return i.ram_gib
        return i.gpu_count * i.gpu.memory_gb

    @property
    def usd_per_gpu_hour(self) -> float:
        """USD per GPU and hour."""
        return self.price.usd_per_hour / self.instance.gpu_count


@dataclass(frozen=True)
class Catalog:
    """All that was loaded: every instance and offer, plus what could not be read and why (one line each).

    calibration: corrections by measurement that its GPUs carry, in words."""

    gpus: dict[str, Gpu]
    links: dict[str, Link]
    instances: tuple[Instance, ...]
    offers: tuple[Offer, ...]
    problems: tuple[str, ...] = ()
    sources: tuple[str, ...] = field(default=())
    calibration: tuple[str, ...] = ()

    @property
    def newest_price(self) -> dt.date | None:
        """Date of the newest price that is not 'owned'."""
        return max((o.price.observed_on for o in self.offers if o.price.tier != "owned"), default=None)

"""Who trains a model: one Framework per training stack, read from training.yaml (what it can do, and its constants)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from planner.engines.records import read_yaml
from planner.errors import UnknownNameError
from planner.hardware.records import Gpu

WRITTEN_PRECISIONS = ("bf16", "fp16", "fp8", "fp32")
"""What launch files can train in; a framework plans with its own `precisions` and refuses some of these when files are written."""


@dataclass(frozen=True)
class KernelSet:
    """Bytes kept for backward per token and layer, by width; see training.yaml for the equation and its source.

    hidden, q, kv, gated, plain: bytes per element of the residual width, the query width, the key and value width, and
    the feed-forward width. split_hidden: part of `hidden` that tensor parallelism cuts without sequence parallel.
    scores: bytes per head and pair of positions (0 with flash attention).
    """

    name: str
    hidden: float
    q: float
    kv: float
    gated: float
    plain: float
    split_hidden: float
    scores: float


@dataclass(frozen=True)
class OptimizerState:
    """Bytes of state per trainable parameter. other_moments: of embedding and head. master: keeps fp32 copies."""

    name: str
    moments: float
    other_moments: float
    master: bool
    paged: bool


@dataclass(frozen=True)
class Combinations:
    """What a framework's own scripts do only together with something else; None = no such limit.

    tensor_dense_only: tensor parallelism does not cut experts.
    pipeline_*, tensor_*: what goes with more than one stage or rank. offload_optimizers: whose states can be on the host.
    least_stage: ZeRO stage an optimizer needs at least, most_stage: allows at most. packed_only: takes no padding.
    context_plain: context parallelism takes neither padding nor chunked loss. checkpoint_divides: layers per checkpoint
    divide the layers of every stage. optimizer_methods: all an optimizer goes with.
    """

    pipeline_methods: tuple[str, ...] | None = None
    pipeline_optimizers: tuple[str, ...] | None = None
    pipeline_offloads: bool = True
    pipeline_packed_only: bool = False
    tensor_methods: tuple[str, ...] | None = None
    tensor_dense_only: bool = False
    offload_optimizers: tuple[str, ...] | None = None
    least_stage: dict[str, int] = field(default_factory=dict, hash=False)
    most_stage: dict[str, int] = field(default_factory=dict, hash=False)
    packed_only: bool = False
    context_plain: bool = False
    checkpoint_divides: bool = False
    optimizer_methods: dict[str, list[str]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class CpuSupport:
    """What a framework does on CPU devices, and the constants that differ there. No offload: a CPU has nowhere to."""

    axes: tuple[str, ...]
    methods: tuple[str, ...]
    precisions: tuple[str, ...]
    optimizers: tuple[str, ...]
    constants: dict[str, float] = field(hash=False)


@dataclass(frozen=True)
class Framework:
    """A training framework at a version.

    axes: of tensor, pipeline, context, data, expert. zero_stages and the stages allowed beside pipeline and tensor
    parallelism; models: the only ones it has a configuration for, by hub id without -Instruct (empty = any); offloads: kind -> ZeRO stages it works with. checkpoint_any_interval: False = every layer or none.
    """

    name: str
    version: str
    label: str
    axes: tuple[str, ...]
    vendors: tuple[str, ...]
    zero_stages: tuple[int, ...]
    zero_with_pipeline: tuple[int, ...]
    zero_with_tensor: tuple[int, ...]
    tensor_with_pipeline: bool
    methods: tuple[str, ...]
    precisions: tuple[str, ...]
    optimizers: tuple[str, ...]
    offloads: dict[str, tuple[int, ...]] = field(hash=False)
    kernels: KernelSet
    checkpoint_any_interval: bool
    sequence_parallel: bool
    uneven_stages: bool
    source: str
    verified: bool
    constants: dict[str, float] = field(hash=False)
    combinations: Combinations = field(default_factory=Combinations, hash=False)
    models: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    cpu: CpuSupport | None = None

    def number(self, name: str) -> float:
        """A constant of training.yaml by name; KeyError for a name that no file has."""
        return self.constants[name]

    @property
    def weight_stage(self) -> int:
        """ZeRO stage from which weights are sharded."""
        return 2 if self.number("stage2_gathered") else 3

    def shards_frozen(self, method: str) -> bool:
        """Whether the weights that LoRA or QLoRA do not train are sharded with the others; 4-bit ones are not everywhere."""
        return method == "lora" or self.number("quantised_sharded") > 0

    def runs_on(self, gpu: Gpu) -> bool:
        """True when the framework supports the GPU's vendor."""
        return gpu.vendor in self.vendors or (gpu.vendor == "cpu" and self.cpu is not None)

    def on(self, gpu: Gpu) -> Framework:
        """The framework on this device: what it does and its constants on a CPU, and constants measured on the device."""
        return self if gpu.vendor != "cpu" and not gpu.measured else _on(self, gpu)


@cache
def _on(framework: Framework, gpu: Gpu) -> Framework:
    here = {name: value for name, value in gpu.measured.items() if name in framework.constants}
    cpu = framework.cpu
    if gpu.vendor != "cpu" or cpu is None:
        return replace(framework, constants={**framework.constants, **here})
    return replace(
        framework,
        axes=cpu.axes,
        methods=cpu.methods,
        precisions=cpu.precisions,
        optimizers=cpu.optimizers,
        offloads={},
        constants={**framework.constants, **here, **cpu.constants},
    )


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = read_yaml("training.yaml")
    return data


@cache
def kernel_sets() -> dict[str, KernelSet]:
    """All kernel sets by name."""
    drop = ("source", "verified")
    return {
        n: KernelSet(n, **{k: v for k, v in row.items() if k not in drop}) for n, row in _data()["kernel_sets"].items()
    }


def optimizer_state(name: str) -> OptimizerState:
    """State of the optimizer of that name; UnknownNameError with the nearest names otherwise."""
    table = _data()["optimizers"]
    if name not in table:
        raise UnknownNameError("optimizer", name, table)
    return OptimizerState(name, **{k: v for k, v in table[name].items() if k != "source"})


def host_link_gb_per_s(gpu: Gpu) -> float:
    """GB/s between a GPU and host memory: measured on it, or for its PCIe generation (beyond the known ones: the nearest)."""
    if "host_link_gb_per_s" in gpu.measured:
        return gpu.measured["host_link_gb_per_s"]
    table = _data()["host_link_gb_per_s"]
    return float(table[min(max(gpu.pcie_gen, min(table)), max(table))]["value"])


def _values(rows: dict[str, Any]) -> dict[str, float]:
    return {name: float(row["value"]) for name, row in rows.items()}


def _read(name: str, row: dict[str, Any], constants: dict[str, float]) -> Framework:
    listed = (
        "axes",
        "vendors",
        "zero_stages",
        "zero_with_pipeline",
        "zero_with_tensor",
        "methods",
        "precisions",
        "optimizers",
    )
    fields = {k: tuple(row[k]) for k in listed}
    return Framework(
        name=name,
        version=row["version"],
        label=row["label"],
        offloads={k: tuple(v) for k, v in row["offloads"].items()},
        tensor_with_pipeline=bool(row.get("tensor_with_pipeline", True)),
        kernels=kernel_sets()[row["kernel_set"]],
        checkpoint_any_interval=row["checkpoint_any_interval"],
        sequence_parallel=row["sequence_parallel"],
        uneven_stages=row["uneven_stages"],
        source=row["source"],
        verified=row["verified"],
        constants=constants,
        combinations=_combinations(row.get("combinations", {})),
        models={name: tuple(words) for name, words in row.get("models", {}).items()},
        cpu=_cpu(row.get("cpu")),
        **fields,
    )


def _cpu(row: dict[str, Any] | None) -> CpuSupport | None:
    if row is None:
        return None
    listed = {k: tuple(row[k]) for k in ("axes", "methods", "precisions", "optimizers")}
    return CpuSupport(**listed, constants=_values({**_data()["cpu_defaults"], **row["constants"]}))


def _combinations(row: dict[str, Any]) -> Combinations:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
    return Combinations(**fields)


@cache
def frameworks() -> dict[str, Framework]:
    """All frameworks that a plan may name."""
    base = _values(_data()["defaults"])
    return {n: _read(n, row, {**base, **_values(row["constants"])}) for n, row in _data()["frameworks"].items()}


@cache
def stacks() -> dict[str, Framework]:
    """Frameworks plus the stacks whose measurements are replayed."""
    found = dict(frameworks())
    for name, row in _data()["stacks"].items():
        parent = _data()["frameworks"][row["like"]]
        merged = {
            **parent,
            "version": "",
            "label": name,
            "verified": True,
            **{k: v for k, v in row.items() if k != "like"},
        }
        found[name] = _read(name, merged, {**frameworks()[row["like"]].constants, **_values(row["constants"])})
    return found


def framework(name: str) -> Framework:
    """The framework of that name; UnknownNameError with the nearest names otherwise."""
    table = frameworks()
    if name not in table:
        raise UnknownNameError("training framework", name, table)
    return table[name]

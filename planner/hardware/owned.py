"""One's own machines, written '2xrtx-4090' (one machine of two) or '8x8xa100-sxm-80' (8 machines of 8)."""

from __future__ import annotations

import datetime as dt
import math
import re
from dataclasses import dataclass, replace

from planner.errors import InvalidValueError, UnknownNameError
from planner.hardware.names import find_gpu
from planner.hardware.records import Catalog, Gpu, Instance, Link, Offer, Price

_ITEM = re.compile(r"^(?:(\d{1,9})\s*[x×*]\s*)?(?:(\d{1,9})\s*[x×*]\s*)?(.+?)(\+nvlink)?$", re.I)
_COUNT = re.compile(r"^([-+.,\d]+)\s*[x×*]")
_EXAMPLE = "Write for example 2xrtx-4090 (one machine), 8x8xa100-sxm-80 (8 machines of 8) or 2xrtx-3090+nvlink."
_MAX_MACHINES, _MAX_GPUS = 10_000, 256
_RDMA_FROM_GBIT = 200.0
_NO_DATE = dt.date(2000, 1, 1)


@dataclass(frozen=True)
class _Machines:
    gpu: Gpu
    per_machine: int
    machines: int
    link: Link

    @property
    def name(self) -> str:
        bridged = "+nvlink" if self.link.kind == "nvlink-bridge" else ""
        return f"{self.per_machine}x{self.gpu.name}{bridged}"


def owned_offers(text: str, fabric_gbps: float | None, catalog: Catalog) -> tuple[Offer, ...]:
    """Offers for one's own machines: tier 'owned', 0 USD/h, quota = how many there are.

    text: items separated by commas, each [MACHINESx][GPUSx]GPU with an optional '+nvlink' for cards joined by a bridge.
    Without it the link is the GPU's default. fabric_gbps: Gbit/s of one machine towards the others; RDMA is assumed
    from 200 Gbit/s, TCP below; without it no replica spans machines (owned_notes says so). vCPUs and RAM are unknown.
    Errors: UnknownNameError for the GPU, InvalidValueError for counts, fabric, or more GPUs than the link joins.
    """
    if fabric_gbps is not None and (not math.isfinite(fabric_gbps) or not 0 < fabric_gbps <= 1e6):
        raise InvalidValueError(
            f"--fabric-gbps must be a positive, finite number, not {fabric_gbps!r}",
            "",
            "Write for example --fabric-gbps 400.",
        )
    date = catalog.newest_price or _NO_DATE
    return tuple(_offer(m, fabric_gbps, catalog, date) for m in _machines(text, catalog))


def owned_notes(text: str, fabric_gbps: float | None, catalog: Catalog) -> tuple[str, ...]:
    """What a plan should state as assumed for these machines, one sentence each."""
    notes = []
    machines = _machines(text, catalog)
    for m in machines:
        if m.per_machine > 1:
            rate = f"{m.link.bandwidth_gb_per_s:g} GB/s each way"
            notes.append(f"{m.name}: GPUs of a machine reach each other over {m.link.name} ({rate}).")
        if m.machines > 1 and fabric_gbps is None:
            notes.append(
                f"{m.machines} machines of {m.name}: no --fabric-gbps was given, so no replica spans machines."
            )
        elif m.machines > 1 and fabric_gbps is not None:
            kind = "RDMA" if fabric_gbps >= _RDMA_FROM_GBIT else "TCP"
            notes.append(
                f"{m.machines} machines of {m.name}: {fabric_gbps:g} Gbit/s between machines, taken as {kind}."
            )
    if fabric_gbps is not None and all(m.machines == 1 for m in machines):
        notes.append("--fabric-gbps is not used: there is one machine of each kind.")
    notes.append("Owned machines cost 0 USD/h here: power, housing and purchase are not counted.")
    return tuple(notes)


def _machines(text: str, catalog: Catalog) -> list[_Machines]:
    found: dict[str, _Machines] = {}
    for item in text.split(","):
        one = _machine(item.strip(), catalog)
        earlier = found.get(one.name)
        found[one.name] = (
            one if earlier is None else _Machines(one.gpu, one.per_machine, earlier.machines + one.machines, one.link)
        )
    return list(found.values())


def _machine(item: str, catalog: Catalog) -> _Machines:
    match = _ITEM.match(item)
    if not match:
        raise InvalidValueError(f"--on {item[:80]!r} is not a machine", "", _EXAMPLE)
    first, second = match[1], match[2]
    machines, per_machine = (int(first), int(second)) if second else (1, int(first or 1))
    if not 1 <= machines <= _MAX_MACHINES or not 1 <= per_machine <= _MAX_GPUS:
        why = f"1 to {_MAX_MACHINES} machines of 1 to {_MAX_GPUS} GPUs can be planned"
        raise InvalidValueError(f"--on {item[:80]!r} is out of range", why, _EXAMPLE)
    try:
        gpu = find_gpu(match[3], catalog)
    except UnknownNameError:
        count = _COUNT.match(match[3])
        if count is None:
            raise
        raise InvalidValueError(
            f"--on {item[:80]!r}: {count[1][:20]} is no count of machines or GPUs", "", _EXAMPLE
        ) from None
    if match[4] and not gpu.bridge_link:
        raise InvalidValueError(f"--on {item[:80]!r}: {gpu.name} takes no NVLink bridge", "", "Drop '+nvlink'.")
    name = "none" if per_machine == 1 else gpu.bridge_link if match[4] else gpu.default_link
    link = catalog.links[name]
    if per_machine > 1 and per_machine > link.max_gpus and link.beyond is None:
        why = f"{link.name} joins at most {link.max_gpus} GPUs"
        raise InvalidValueError(f"--on {item[:80]!r} has too many GPUs in one machine", why, _EXAMPLE)
    return _Machines(gpu, per_machine, machines, link)


def _offer(m: _Machines, fabric_gbps: float | None, catalog: Catalog, date: dt.date) -> Offer:
    fabric = _fabric(fabric_gbps, m.per_machine, catalog) if fabric_gbps is not None and m.machines > 1 else None
    caveat = "owned: price 0, vCPUs and RAM unknown"
    instance = Instance(
        "owned", m.name, m.gpu, m.per_machine, m.link, fabric, None, None, None, m.machines, caveat, fabric_gbps
    )
    return Offer(instance, Price(0.0, "local", "owned", date, "stated with --on"), m.machines)


def _fabric(gbit: float, per_machine: int, catalog: Catalog) -> Link:
    """The share of one GPU in a machine's network: Gbit/s / 8 / GPUs = GB/s; latency as the catalog's like fabric."""
    like = catalog.links["ib-400g" if gbit >= _RDMA_FROM_GBIT else "tcp-100g"]
    share = gbit / per_machine
    return replace(
        like,
        name=f"owned-{share:g}g",
        bandwidth_gb_per_s=share / 8,
        measured_busbw_gb_per_s=None,
        verified=False,
        source=f"--fabric-gbps {gbit:g}",
    )

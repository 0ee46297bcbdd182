"""The candidate space: every legal (hardware class, layout, precision, KV dtype, engine), as index arrays.

A shard is what the estimators see (no prices, no node sizes); a pair is a shard run by an engine; a candidate places
a pair on a hardware class. What was left out is counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.engines.records import EngineSpec
from planner.models.precision import KvDtype, Precision
from planner.models.spec import ModelSpec
from planner.request import Pins
from planner.space.hardware_classes import HardwareClass
from planner.space.layouts import MAX_TENSOR_PARALLEL, Layout, Rule, engine_problem, layouts
from planner.space.shard import Shard
from planner.units import GIB

FILL = 0.7


@dataclass(frozen=True)
class Candidate:
    """A pair placed on a hardware class."""

    hardware: int
    pair: int
    layout: Layout


@dataclass(frozen=True)
class Space:
    """shards; pairs as (shard, engine) indices; candidates; counts of what was left out, by reason."""

    classes: tuple[HardwareClass, ...]
    engines: tuple[EngineSpec, ...]
    shards: tuple[Shard, ...]
    pairs: tuple[tuple[int, int], ...]
    candidates: tuple[Candidate, ...]
    excluded: dict[str, int]


@dataclass(frozen=True)
class Axes:
    """The values to search: precisions and KV dtypes (already filtered by the pins), engines, and the model's rules.

    weights_bytes: of the whole model, by precision name. near_miss: keep replicas that need up to so many times the memory.
    """

    precisions: Sequence[Precision]
    kv_dtypes: Sequence[KvDtype]
    engines: Sequence[EngineSpec]
    tensor_rule: Rule
    pipeline_rule: Rule
    weights_bytes: Mapping[str, float]
    near_miss: float


def pinned_rule(rule: Rule, wanted: int | None) -> Rule:
    """The rule, further narrowed to one value when the user pinned it."""
    if wanted is None:
        return rule
    return lambda degree: rule(degree) if degree == wanted else f"pinned to {wanted}"


def runnable(engine: EngineSpec, hw: HardwareClass, axes: Axes) -> list[tuple[Precision, KvDtype, int]]:
    """The (precision, KV dtype, most tensor parallelism) this engine runs on this GPU.

    The 16-bit KV dtypes follow the compute dtype: an fp16 model keeps an fp16 cache, a bf16 one a bf16 cache.
    """
    found = []
    for precision in axes.precisions:
        support = engine.support(precision.name, hw.gpu)
        if support is None:
            continue
        for kv in axes.kv_dtypes:
            if not engine.supports_kv(kv.name, hw.gpu):
                continue
            if kv.name in ("bf16", "fp16") and kv.name != sixteen_bit(precision, hw):
                continue
            found.append((precision, kv, support.max_tensor_parallel or MAX_TENSOR_PARALLEL))
    return found


def sixteen_bit(precision: Precision, hw: HardwareClass) -> str:
    """The 16-bit dtype that activations and an unquantised cache have: fp16 where the GPU has no bf16, else bf16."""
    if precision.name == "fp16":
        return "fp16"
    return "bf16" if "bf16" in hw.gpu.peak_tflops else "fp16"


def replica_size_problem(weights_bytes: float, layout: Layout, usable_bytes: float, near_miss: float) -> str | None:
    """Why a replica of this size is not worth estimating, in words; None when it is.

    Too small: an even share of the weights alone is above near_miss times the GPU. Too deep: more than twice the
    pipeline stages with which the weights fill at most FILL of the GPU; further stages add latency and hand-overs,
    and replicas use the same GPUs better.
    """
    if weights_bytes / (layout.tensor_parallel * layout.pipeline_parallel) > near_miss * usable_bytes:
        return f"weights alone need more than {near_miss:g} times the memory"
    if layout.pipeline_parallel > 1:
        enough = weights_bytes / (layout.tensor_parallel * FILL * usable_bytes)
        if layout.pipeline_parallel > 2 * max(1.0, enough):
            return "deeper pipeline than the memory needs"
    return None


def build_space(classes: Iterable[HardwareClass], axes: Axes) -> Space:
    """Enumerate all legal candidates; reasons for what is left out are counted, not lost."""
    hardware, engines = tuple(classes), tuple(axes.engines)
    shard_index: dict[tuple[object, ...], int] = {}
    shards: list[Shard] = []
    pair_index: dict[tuple[int, int], int] = {}
    candidates: list[Candidate] = []
    excluded: Counter[str] = Counter()
    cells: dict[tuple[str, str], list[tuple[Precision, KvDtype, int]]] = {}
    for h, hw in enumerate(hardware):
        usable = [(e, engine) for e, engine in enumerate(engines) if engine.supports_gpu(hw.gpu)]
        if not usable:
            excluded[f"no engine runs on {hw.gpu.name}"] += 1
            continue
        shapes = layouts(hw, axes.tensor_rule, axes.pipeline_rule)
        if not shapes:
            excluded["no legal layout on the machine"] += 1
        sizes = {(p.name, i): replica_size_problem(axes.weights_bytes[p.name], s, hw.gpu.usable_gib * GIB, axes.near_miss) for p in axes.precisions for i, s in enumerate(shapes)}
        for e, engine in usable:
            key = (engine.name, hw.gpu.name)
            if key not in cells:
                cells[key] = runnable(engine, hw, axes)
            for i, layout in enumerate(shapes):
                if engine_problem(engine, layout) is not None:
                    excluded["engine cannot run the layout"] += len(cells[key])
                    continue
                links = (layout.tensor_link.name if layout.tensor_link else "", layout.pipeline_link.name if layout.pipeline_link else "")
                for precision, kv, most_tensor in cells[key]:
                    reason = sizes[precision.name, i]
                    if reason is None and layout.tensor_parallel > most_tensor:
                        reason = "engine cannot run the layout"
                    if reason is not None:
                        excluded[reason] += 1
                        continue
                    name = (hw.gpu.name, precision.name, kv.name, layout.tensor_parallel, layout.pipeline_parallel, *links)
                    s = shard_index.setdefault(name, len(shards))
                    if s == len(shards):
                        shards.append(Shard(hw.gpu, precision, kv, layout.tensor_parallel, layout.pipeline_parallel, layout.tensor_link, layout.pipeline_link))
                    candidates.append(Candidate(h, pair_index.setdefault((s, e), len(pair_index)), layout))
    return Space(hardware, engines, tuple(shards), tuple(pair_index), tuple(candidates), dict(excluded))

"""The candidate space: every legal (hardware class, layout, precision, KV dtype, engine), as index arrays.

A shard is what the estimators see (no prices, no node sizes); a pair is a shard run by an engine; a candidate places
a pair on a hardware class. What was left out is counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from planner.engines.records import EngineSpec
from planner.models.precision import KvDtype, Precision
from planner.models.spec import ModelSpec
from planner.request import Pins
from planner.space.hardware_classes import HardwareClass
from planner.space.layouts import Layout, Rule, engine_problem, layouts
from planner.space.shard import Shard


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
    """The values to search: precisions and KV dtypes (already filtered by the pins), engines, and the model's rules."""

    precisions: Sequence[Precision]
    kv_dtypes: Sequence[KvDtype]
    engines: Sequence[EngineSpec]
    tensor_rule: Rule
    pipeline_rule: Rule


def pinned_rule(rule: Rule, wanted: int | None) -> Rule:
    """The rule, further narrowed to one value when the user pinned it."""
    if wanted is None:
        return rule
    return lambda degree: rule(degree) if degree == wanted else f"pinned to {wanted}"


def runnable(engine: EngineSpec, hw: HardwareClass, axes: Axes) -> list[tuple[Precision, KvDtype]]:
    """The (precision, KV dtype) combinations this engine runs on this GPU.

    The 16-bit KV dtypes follow the compute dtype: an fp16 model keeps an fp16 cache, a bf16 one a bf16 cache.
    """
    found = []
    for precision in axes.precisions:
        if engine.support(precision.name, hw.gpu) is None:
            continue
        for kv in axes.kv_dtypes:
            if not engine.supports_kv(kv.name, hw.gpu):
                continue
            if kv.name in ("bf16", "fp16") and kv.name != sixteen_bit(precision, hw):
                continue
            found.append((precision, kv))
    return found


def sixteen_bit(precision: Precision, hw: HardwareClass) -> str:
    """The 16-bit dtype that activations and an unquantised cache have: fp16 where the GPU has no bf16, else bf16."""
    if precision.name == "fp16":
        return "fp16"
    return "bf16" if "bf16" in hw.gpu.peak_tflops else "fp16"


def build_space(classes: Iterable[HardwareClass], axes: Axes, progress: Callable[[str], None] | None = None) -> Space:
    """Enumerate all legal candidates; reasons for what is illegal are counted, not lost."""
    hardware = tuple(classes)
    engines = tuple(axes.engines)
    shard_index: dict[Shard, int] = {}
    pair_index: dict[tuple[int, int], int] = {}
    candidates: list[Candidate] = []
    excluded: Counter[str] = Counter()
    cells: dict[tuple[str, str], list[tuple[Precision, KvDtype]]] = {}
    for h, hw in enumerate(hardware):
        usable = [(e, engine) for e, engine in enumerate(engines) if engine.supports_gpu(hw.gpu)]
        if not usable:
            excluded[f"no engine runs on {hw.gpu.name}"] += 1
            continue
        shapes = layouts(hw, axes.tensor_rule, axes.pipeline_rule)
        if not shapes:
            excluded["no legal layout on the machine"] += 1
        for e, engine in usable:
            key = (engine.name, hw.gpu.name)
            if key not in cells:
                cells[key] = runnable(engine, hw, axes)
            for layout in shapes:
                if engine_problem(engine, layout) is not None:
                    excluded["engine cannot run the layout"] += len(cells[key])
                    continue
                for precision, kv in cells[key]:
                    shard = Shard(
                        hw.gpu, precision, kv, layout.tensor_parallel, layout.pipeline_parallel, layout.tensor_link, layout.pipeline_link
                    )
                    s = shard_index.setdefault(shard, len(shard_index))
                    p = pair_index.setdefault((s, e), len(pair_index))
                    candidates.append(Candidate(h, p, layout))
    return Space(hardware, engines, tuple(shard_index), tuple(pair_index), tuple(candidates), dict(excluded))


def axes_for(model: ModelSpec, pins: Pins, engines: Sequence[EngineSpec], precisions: Sequence[Precision], kv: Sequence[KvDtype]) -> Axes:
    """The axes of a request. The model's divisibility rules come from planner.models.limits."""
    from planner.models.limits import pipeline_parallel_problem, tensor_parallel_problem

    return Axes(
        precisions,
        kv,
        engines,
        pinned_rule(lambda tp: tensor_parallel_problem(model, tp), pins.tensor_parallel),
        pinned_rule(lambda pp: pipeline_parallel_problem(model, pp), pins.pipeline_parallel),
    )

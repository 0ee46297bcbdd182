"""The candidate space: every legal (hardware class, layout, precision, KV dtype, engine), as index arrays.

A shard is what the estimators see (no prices, no node sizes); a pair is a shard run by an engine; a candidate places
a pair on a hardware class. What was left out is counted by reason (once per GPU and layout).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.engines.records import EngineSpec
from planner.hardware.records import Gpu
from planner.models.precision import KvDtype, Precision
from planner.space.hardware_classes import HardwareClass
from planner.space.layouts import MAX_TENSOR_PARALLEL, Layout, Rule, engine_problem, layouts, no_layout
from planner.space.shard import Shard
from planner.units import GIB

IntArray = NDArray[np.int64]

FILL = 0.7
LOAD_FILL = 0.95


@dataclass(frozen=True)
class Space:
    """All candidates. A candidate places a pair on a hardware class in a layout: equal-length index arrays.

    pairs: (shard, engine) indices. candidate_hardware, candidate_pair, candidate_layout: indices into classes, pairs and
    layouts. excluded: counts of what was left out, by reason.
    """

    classes: tuple[HardwareClass, ...]
    engines: tuple[EngineSpec, ...]
    shards: tuple[Shard, ...]
    pairs: tuple[tuple[int, int], ...]
    layouts: tuple[Layout, ...]
    candidate_hardware: IntArray
    candidate_pair: IntArray
    candidate_layout: IntArray
    excluded: dict[str, int]

    def __len__(self) -> int:
        return len(self.candidate_pair)


ExpertMode = tuple[int, int]
Method = tuple[Precision, KvDtype, int, bool]


@dataclass(frozen=True)
class Axes:
    """The values to search: precisions and KV dtypes (already filtered by the pins), engines, and the model's rules.

    weights_bytes: of the whole model, by precision name. near_miss: keep replicas that need up to so many times the memory.
    published_bytes: of the weights as published. obtainable: can weights in this precision be had for this engine (published, or made while loading)?
    made_while_loading: does the engine convert the published weights itself? precision_rule: why a precision cannot be cut over so many ranks.
    pipeline_pinned: whether the number of stages was asked for. kv_heads: fewest key/value heads of a layer (None = no such layer).
    experts: a mixture of experts. expert_modes: how the tensor-parallel group may be shared out, as (expert_parallel, attention_data_parallel) pairs.
    """

    precisions: Sequence[Precision]
    kv_dtypes: Sequence[KvDtype]
    engines: Sequence[EngineSpec]
    tensor_rule: Rule
    pipeline_rule: Rule
    weights_bytes: Mapping[str, float]
    near_miss: float
    published_bytes: float = 0.0
    obtainable: Callable[[EngineSpec, Precision, bool], bool] = lambda engine, precision, needs_checkpoint: True
    expert_modes: Callable[[int], Sequence[ExpertMode]] = lambda tp: ((1, 1),)
    made_while_loading: Callable[[EngineSpec, Precision, bool], bool] = lambda engine, precision, needs_checkpoint: (
        False
    )
    precision_rule: Callable[[Precision, int, int], str | None] = lambda precision, tp, ep: None
    kv_heads: int | None = None
    experts: bool = False
    pipeline_pinned: bool = False


def pinned_rule(rule: Rule, wanted: int | None) -> Rule:
    """The rule, further narrowed to one value when the user pinned it."""
    if wanted is None:
        return rule
    return lambda degree: rule(degree) if degree == wanted else f"pinned to {wanted}"


def runnable(engine: EngineSpec, hw: HardwareClass, axes: Axes) -> list[Method]:
    """The (precision, KV dtype, most tensor parallelism, loads the published weights whole) this engine runs on this GPU.

    The 16-bit KV dtypes follow the compute dtype: an fp16 model keeps an fp16 cache, a bf16 one a bf16 cache.
    """
    found = []
    for precision in axes.precisions:
        support = engine.support(precision.name, hw.gpu)
        if support is None or not hw.gpu.computes(precision.compute_dtype) or (axes.experts and not support.experts):
            continue
        if not axes.obtainable(engine, precision, support.needs_checkpoint):
            continue
        for kv in axes.kv_dtypes:
            if not engine.supports_kv(kv.name, hw.gpu):
                continue
            if kv.name in ("bf16", "fp16") and kv.name != sixteen_bit(precision, hw):
                continue
            loads_whole = engine.online_load == "whole" and axes.made_while_loading(
                engine, precision, support.needs_checkpoint
            )
            found.append((precision, kv, support.max_tensor_parallel or MAX_TENSOR_PARALLEL, loads_whole))
    return found


def sixteen_bit(precision: Precision, hw: HardwareClass) -> str:
    """The 16-bit dtype that activations and an unquantised cache have: fp16 where the GPU has no bf16, else bf16."""
    if precision.name == "fp16":
        return "fp16"
    return "bf16" if "bf16" in hw.gpu.peak_tflops else "fp16"


def replica_size_problem(
    weights_bytes: float, layout: Layout, usable_bytes: float, near_miss: float, *, pinned: bool = False
) -> str | None:
    """Why a replica of this size is not worth estimating, in words; None when it is.

    Too small: an even share of the weights alone is above near_miss times the GPU. Too deep: more than twice the
    pipeline stages with which the weights fill at most FILL of the GPU; further stages add latency and hand-overs,
    and replicas use the same GPUs better, unless the number of stages was `pinned`.
    """
    if weights_bytes / (layout.tensor_parallel * layout.pipeline_parallel) > near_miss * usable_bytes:
        return f"weights alone need more than {near_miss:g} times the memory"
    if layout.pipeline_parallel > 1 and not pinned:
        enough = weights_bytes / (layout.tensor_parallel * FILL * usable_bytes)
        if layout.pipeline_parallel > 2 * max(1.0, enough):
            return "deeper pipeline than the memory needs"
    return None


@dataclass
class _Builder:
    """Shards and pairs seen so far; cells: the pairs of one GPU in one shape, made once for all classes that share it."""

    axes: Axes
    shards: list[Shard]
    pairs: list[tuple[int, int]]
    excluded: Counter[str]
    methods: dict[tuple[str, str], list[Method]]
    cells: dict[tuple[object, ...], IntArray]

    def pairs_of(self, hw: HardwareClass, layout: Layout, usable: list[tuple[int, EngineSpec]]) -> IntArray:
        """Positions of the pairs that run on this GPU in this layout."""
        links = (
            layout.tensor_link.name if layout.tensor_link else "",
            layout.pipeline_link.name if layout.pipeline_link else "",
        )
        key = (hw.gpu.name, layout.tensor_parallel, layout.pipeline_parallel, layout.nodes_per_replica > 1, *links)
        if key not in self.cells:
            self.cells[key] = self._make(hw, layout, usable)
        return self.cells[key]

    def _make(self, hw: HardwareClass, layout: Layout, usable: list[tuple[int, EngineSpec]]) -> IntArray:
        tp, pp = layout.tensor_parallel, layout.pipeline_parallel
        size = {
            p.name: replica_size_problem(
                self.axes.weights_bytes[p.name],
                layout,
                hw.gpu.usable_gib * GIB,
                self.axes.near_miss,
                pinned=self.axes.pipeline_pinned,
            )
            for p in self.axes.precisions
        }
        modes = self.axes.expert_modes(tp)
        whole = self.axes.published_bytes / (tp * pp)
        shard_at: dict[tuple[object, ...], int] = {}
        found = []
        for e, engine in usable:
            if (engine.name, hw.gpu.name) not in self.methods:
                self.methods[engine.name, hw.gpu.name] = runnable(engine, hw, self.axes)
            methods = self.methods[engine.name, hw.gpu.name]
            if engine_problem(engine, layout, self.axes.kv_heads) is not None:
                self.excluded["engine cannot run the layout"] += len(methods)
                continue
            for precision, kv, most_tensor, loads_whole in methods:
                reason = "engine cannot run the layout" if tp > most_tensor else size[precision.name]
                if reason is None and loads_whole and whole > LOAD_FILL * hw.gpu.usable_gib * GIB:
                    reason = "published weights do not fit while they are converted"
                if reason is not None:
                    self.excluded[reason] += 1
                    continue
                for expert, attention in modes:
                    if self.axes.precision_rule(precision, tp, expert) is not None:
                        self.excluded["ranks would cut quantisation blocks apart"] += 1
                        continue
                    if (expert > 1 and not engine.expert_parallel) or (
                        attention > 1 and not engine.data_parallel_attention
                    ):
                        self.excluded["engine cannot run the layout"] += 1
                        continue
                    name = (precision.name, kv.name, expert, attention)
                    if name not in shard_at:
                        shard_at[name] = len(self.shards)
                        self.shards.append(
                            Shard(
                                hw.gpu,
                                precision,
                                kv,
                                tp,
                                pp,
                                layout.tensor_link,
                                layout.pipeline_link,
                                expert,
                                attention,
                            )
                        )
                    found.append(len(self.pairs))
                    self.pairs.append((shard_at[name], e))
        return np.array(found, dtype=np.int64)


def gpu_problem(engines: Sequence[EngineSpec], gpu: Gpu) -> str:
    """Why none of the engines runs on a GPU: its vendor, or its compute capability."""
    names = [*dict.fromkeys(e.name for e in engines)]
    who = f"{names[0]} does not run" if len(names) == 1 else "no engine runs"
    vendors = sorted({vendor for e in engines for vendor in e.vendors})
    if gpu.vendor not in vendors:
        return f"{who} on {gpu.name}: its vendor is {gpu.vendor}, not {' or '.join(vendors)}"
    least = min(e.min_compute_capability for e in engines if gpu.vendor in e.vendors)
    return f"{who} on {gpu.name}: its compute capability is {gpu.compute_capability or 0:g}, below {least:g}"


def method_problem(engines: Sequence[EngineSpec], hw: HardwareClass, axes: Axes) -> str:
    """Why engines that run on this GPU have no (precision, KV dtype) of the request there: the first of the rules of `runnable` that
    none of them passes."""
    gpu, weights = hw.gpu, ", ".join(p.name for p in axes.precisions)
    names = [*dict.fromkeys(e.name for e in engines)]
    who, it = (names[0], "it runs") if len(names) == 1 else ("any engine", "they run")
    rows = [(e, p, e.support(p.name, gpu)) for e in engines for p in axes.precisions]
    kept = [(e, p, s) for e, p, s in rows if s is not None and gpu.computes(p.compute_dtype)]
    if not kept:
        there = sorted({r.precision for e in engines for r in e.precisions if e.support(r.precision, gpu) is not None})
        return f"{weights} weights do not run on {gpu.name} with {who}; there {it} {', '.join(there) or 'none'}"
    kept = [(e, p, s) for e, p, s in kept if s.experts or not axes.experts]
    if not kept:
        return f"a mixture of experts does not run in {weights} on {gpu.name} with {who}"
    kept = [(e, p, s) for e, p, s in kept if axes.obtainable(e, p, s.needs_checkpoint)]
    if not kept:
        return f"no {weights} weights of the model are published in a format for {who}, nor made while loading"
    wanted = ", ".join(k.name for k in axes.kv_dtypes)
    stored = sorted({k for e, _, _ in kept for k in e.kv_dtypes if e.supports_kv(k, gpu)})
    if not any(k.name in stored for k in axes.kv_dtypes):
        return f"{wanted} KV caches do not run on {gpu.name} with {who}; there {it} {', '.join(stored)} caches"
    own = " or ".join(sorted({sixteen_bit(p, hw) for _, p, _ in kept}))
    return f"{wanted} KV caches do not go with {weights} weights on {gpu.name}: their 16-bit cache is {own}"


def build_space(classes: Iterable[HardwareClass], axes: Axes) -> Space:
    """Enumerate all legal candidates; reasons for what is left out are counted, not lost."""
    hardware, engines = tuple(classes), tuple(axes.engines)
    b = _Builder(axes, [], [], Counter(), {}, {})
    shapes: dict[Layout, int] = {}
    parts: list[tuple[int, int, IntArray]] = []
    for h, hw in enumerate(hardware):
        usable = [(e, engine) for e, engine in enumerate(engines) if engine.supports_gpu(hw.gpu)]
        if not usable:
            b.excluded[gpu_problem(engines, hw.gpu)] += 1
            continue
        possible = layouts(hw, axes.tensor_rule, axes.pipeline_rule)
        if not possible:
            b.excluded[no_layout(hw, axes.tensor_rule, axes.pipeline_rule)] += 1
        for layout in possible:
            pairs = b.pairs_of(hw, layout, usable)
            if len(pairs):
                parts.append((h, shapes.setdefault(layout, len(shapes)), pairs))
        if possible and not any(b.methods.get((engine.name, hw.gpu.name)) for _, engine in usable):
            b.excluded[method_problem([engine for _, engine in usable], hw, axes)] += 1
    sizes = [len(p) for _, _, p in parts]
    return Space(
        hardware,
        engines,
        tuple(b.shards),
        tuple(b.pairs),
        tuple(shapes),
        np.repeat(np.array([h for h, _, _ in parts], dtype=np.int64), sizes),
        np.concatenate([p for _, _, p in parts]) if parts else np.zeros(0, dtype=np.int64),
        np.repeat(np.array([i for _, i, _ in parts], dtype=np.int64), sizes),
        dict(b.excluded),
    )

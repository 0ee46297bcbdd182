"""One configuration: all predictions (estimate) or its memory part by part (memory). Nothing is searched that was pinned."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.errors import InvalidValueError, NoPlanError
from planner.estimator.corrections import calibration_notes
from planner.estimator.operating_point import IntArray, Pairs
from planner.hardware.records import Catalog
from planner.models.spec import ModelSpec
from planner.plan import Cost, Deployment, MemoryUse, Range
from planner.request import Limits, ServeRequest
from planner.solver import assemble, words
from planner.solver.choices import describe_load
from planner.solver.ranking import rank
from planner.solver.serving import WIDE, machines_of
from planner.solver.study import OVERLOADED, Study, make_study, memory_pairs
from planner.units import GIB


@dataclass(frozen=True)
class Estimate:
    """Everything that is predicted for one configuration. fits: the memory suffices; required and capacity in GiB per GPU."""

    deployment: Deployment
    memory: MemoryUse
    fits: bool
    required_gib: float
    capacity_gib: float
    predicted: dict[str, Range]
    cost: Cost
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]


def estimate_serving(request: ServeRequest, model: ModelSpec, catalog: Catalog) -> Estimate:
    """The configuration of the pins on the hardware of the filter; axes left open take their best value for the goal.

    Unpinned precision and KV dtype are those of the checkpoint and 16 bit, not searched; replicas are 1. Errors: InvalidValueError when
    no legal configuration is left, NoPlanError when the pinned replicas cannot carry the load.
    """
    pins = request.pins
    pins = replace(pins, precision=pins.precision or model.native_precision, data_parallel=pins.data_parallel or 1)
    loose = replace(request, pins=pins, limits=Limits(max_accuracy_loss_percent=100.0))
    study = make_study(loose, model, catalog, near_miss=WIDE)
    if not len(study.problem.rows):
        raise _does_not_fit(loose, model, catalog) or _nothing(study)
    ranking = rank(study.problem)
    sixteen = np.array([s.kv_dtype.name in ("bf16", "fp16") for s in study.space.shards])[
        np.array([s for s, _ in study.space.pairs], dtype=np.int64)[study.rows.pair[study.placed.row]]
    ]
    plain = sixteen if request.pins.kv_cache_dtype is None and sixteen.any() else np.ones(len(sixteen), dtype=np.bool_)
    fitting = ranking.broken_count == 0
    order = ranking.order(fitting & plain)
    if not len(order):
        missing = study.problem.rows.metrics["vram"]
        order = np.flatnonzero(plain)[np.argsort(missing[plain], kind="stable")]
    row = int(order[0])
    taken, replicas = machines_of(study.problem, ranking, row), int(ranking.replicas[row])
    deployed = assemble.deployment(study, row, replicas, taken)
    rows, at = study.problem.rows, int(study.placed.row[row])
    return Estimate(
        deployed,
        assemble.memory_use(study, row),
        bool(rows.metrics["vram"][row] <= 0),
        round(float(study.rows.required_bytes[at]) / GIB, 3),
        round(float(study.rows.capacity_bytes[at]) / GIB, 3),
        assemble.predicted(study, row, replicas),
        assemble.cost(study, row, replicas, taken),
        (*words.assumptions(study, catalog), *calibration_notes(catalog, deployed)),
        words.warnings(study, row, deployed.offers),
    )


def _does_not_fit(request: ServeRequest, model: ModelSpec, catalog: Catalog) -> NoPlanError | None:
    """The reason when no layout of the pins holds even one request; None when some does, or there is no layout."""
    pairs, _ = memory_pairs(request, model, catalog)
    if not len(pairs.shard):
        return None
    every = np.arange(len(pairs.shard), dtype=np.int64)
    m = pairs.memory(every, np.ones(len(every), dtype=np.int64))
    missing = np.asarray(m.required_bytes - m.capacity_bytes)
    best = int(missing.argmin())
    if missing[best] <= 0:
        return None
    need, have = float(m.required_bytes[best]) / GIB, float(m.capacity_bytes[best]) / GIB
    return NoPlanError(
        "it does not fit",
        f"one request needs {need:.2f} GiB per GPU, {have:.2f} GiB may be used",
        "Raise --tp, or take a smaller --precision, shorter lengths or a larger GPU.",
    )


def _nothing(study: Study) -> InvalidValueError | NoPlanError:
    reasons = "; ".join(words.nothing_at_all(study))
    if OVERLOADED in study.pruned:
        return NoPlanError(
            f"this configuration cannot carry {describe_load(study.request)}",
            f"its capacity is {study.capacity_per_s:.3g} requests/s" if study.capacity_per_s else "",
            "Add --data-parallel, lower --rate, or leave --data-parallel open.",
        )
    return InvalidValueError("no legal configuration is left", reasons, "Change a pinned axis or the hardware.")


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one configuration on the fullest GPU. parts: (name, GiB), whose sum is required_gib; host_parts: the same of a machine's
    host memory (training); most_sequences: full-length requests at once."""

    title: str
    parts: tuple[tuple[str, float], ...]
    fits: bool
    required_gib: float
    capacity_gib: float
    usable_gib: float
    kv_pool_gib: float
    kv_pool_tokens: int
    kv_bytes_per_token: float
    most_sequences: int
    max_model_len: int
    notes: tuple[str, ...]
    host_parts: tuple[tuple[str, float], ...] = ()


SEQUENCES = (64, 32, 16, 8, 4, 2, 1)


def memory_serving(request: ServeRequest, model: ModelSpec, catalog: Catalog) -> MemoryReport:
    """Memory of the pinned configuration: precision defaults to the checkpoint's, KV cache to 16 bit, degrees to 1.

    Sequences that are not pinned are the most of SEQUENCES that fit.

    Errors: InvalidValueError when the engine, the GPU and the precision do not go together.
    """
    tries = SEQUENCES if request.pins.max_num_seqs is None else (request.pins.max_num_seqs,)
    for sequences in tries:
        report = _memory_with(request, model, catalog, sequences)
        if report.fits:
            break
    return report


def _memory_with(request: ServeRequest, model: ModelSpec, catalog: Catalog, sequences: int) -> MemoryReport:
    pins = request.pins
    pins = replace(
        pins,
        precision=pins.precision or model.native_precision,
        tensor_parallel=pins.tensor_parallel or 1,
        pipeline_parallel=pins.pipeline_parallel or 1,
        max_num_seqs=sequences,
    )
    loose = replace(request, pins=pins, limits=Limits(max_accuracy_loss_percent=100.0))
    pairs, space = memory_pairs(loose, model, catalog)
    if not len(pairs.shard):
        reasons = "; ".join(f"{reason}" for reason in space.excluded) or "no machine has enough GPUs"
        raise InvalidValueError(
            "no legal configuration is left", reasons, "Change the engine, the precision, the degrees or the hardware."
        )
    kinds = [space.shards[int(s)].kv_dtype.name for s in pairs.shard]
    pick = (
        next((i for i, k in enumerate(kinds) if k in ("bf16", "fp16")), 0) if request.pins.kv_cache_dtype is None else 0
    )
    which = np.array([pick], dtype=np.int64)
    return _memory_report(pairs, which, model, sequences)


def _cache_row(pairs: Pairs, which: IntArray, sequences: int, needed_bytes: float) -> tuple[str, float]:
    """What the needed cache is of, in words, and its bytes per token: so many mean requests, or one as long as the engine accepts."""
    settings = pairs.settings
    longest = float(pairs.memory(which, np.array([1], dtype=np.int64)).kv_needed_bytes[0])
    if needed_bytes <= longest:
        return (
            f"KV cache of one request of {settings.max_model_len} tokens, the longest",
            longest / settings.max_model_len,
        )
    tokens = settings.tokens_per_sequence
    return f"KV cache of {sequences} requests of {tokens} tokens", needed_bytes / (sequences * tokens)


def _memory_report(pairs: Pairs, which: IntArray, model: ModelSpec, sequences: int) -> MemoryReport:
    m = pairs.memory(which, np.array([sequences], dtype=np.int64))
    g = {name: float(np.asarray(getattr(m, name)).reshape(-1)[0]) for name in m.__dataclass_fields__}
    shard, engine = pairs.shards[int(pairs.shard[which[0]])], pairs.engines[int(pairs.engine[which[0]])]
    settings = pairs.settings
    cache, bytes_per_token = _cache_row(pairs, which, sequences, g["kv_needed_bytes"])
    groups = int(pairs.groups[which[0]])
    most = int(g["kv_pool_tokens"] // settings.tokens_per_sequence) * groups
    pp = f" PP{shard.pipeline_parallel}" if shard.pipeline_parallel > 1 else ""
    title = (
        f"{model.hf_id or model.name} on {shard.gpu.name}, {engine.name} {engine.version}, weights {shard.precision.name}, "
        f"KV cache {shard.kv_dtype.name}, TP{shard.tensor_parallel}{pp}"
    )
    needed = g["kv_needed_bytes"]
    parts = (
        ("weights", g["weights_bytes"]),
        (cache, needed),
        ("activations and logits", g["activation_bytes"]),
        ("context and communication", g["runtime_bytes"]),
        ("CUDA graphs", g["graphs_bytes"]),
    )
    fits = g["required_bytes"] <= g["capacity_bytes"]
    notes = [
        f"The engine gives the cache {g['kv_pool_bytes'] / GIB:.2f} GiB: {int(g['kv_pool_tokens']) * groups:,} tokens, or {most} such requests at once."
    ]
    if not fits:
        notes.append("Lower --max-num-seqs or the lengths, raise --tp, or take a smaller --precision or a larger GPU.")
    notes.extend(model.assumptions)
    return MemoryReport(
        title,
        tuple((name, round(value / GIB, 3)) for name, value in parts),
        fits,
        round(g["required_bytes"] / GIB, 3),
        round(g["capacity_bytes"] / GIB, 3),
        round(g["usable_bytes"] / GIB, 3),
        round(g["kv_pool_bytes"] / GIB, 3),
        int(g["kv_pool_tokens"]) * groups,
        round(bytes_per_token, 1),
        most,
        settings.max_model_len,
        tuple(notes),
    )

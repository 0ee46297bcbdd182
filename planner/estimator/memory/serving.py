"""Serving memory of many configurations at once: tables per (shard, engine), gathered by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.engines.records import EngineSpec
from planner.estimator.memory.activations import ActivationCost, activation_cost
from planner.estimator.memory.kv_cache import StageKv, WindowCost, stages_kv
from planner.estimator.memory.rules import MemoryRules, memory_rules
from planner.estimator.memory.runtime import graphs_bytes, shard_runtime_bytes
from planner.estimator.memory.weights import stage_sizes, stage_weights_bytes
from planner.models.spec import ModelSpec
from planner.space.shard import Shard
from planner.units import GIB

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ServingRows:
    """Configurations, one a row: indexes into shards and engines, scheduler limits, lengths.

    max_num_seqs and tokens_per_sequence are per attention group of the replica. memory_share: the engine's own fraction
    (gpu_memory_utilization, mem_fraction_static, free_gpu_memory_fraction); None = its default.
    """

    shard: IntArray
    engine: IntArray
    max_num_seqs: IntArray
    max_num_batched_tokens: IntArray
    max_model_len: int | IntArray
    tokens_per_sequence: int | IntArray
    memory_share: float | None = None


@dataclass(frozen=True)
class ServingMemory:
    """Arrays of shape (rows,), bytes on the fullest GPU of a replica unless said.

    kv_pool_bytes: what the engine gives the cache (>= 0); kv_pool_tokens: tokens of sequences of tokens_per_sequence
    that the pool of one attention group holds, the least over stages; kv_needed_bytes: max_num_seqs such sequences, at
    least one of max_model_len; required_bytes = weights + activations + runtime + graphs + kv_needed, to be held
    against capacity_bytes.
    """

    usable_bytes: FloatArray
    budget_bytes: FloatArray
    weights_bytes: FloatArray
    activation_bytes: FloatArray
    runtime_bytes: FloatArray
    graphs_bytes: FloatArray
    kv_pool_bytes: FloatArray
    kv_pool_tokens: FloatArray
    kv_needed_bytes: FloatArray
    required_bytes: FloatArray
    capacity_bytes: FloatArray


@dataclass(frozen=True)
class StageCost:
    """All memory coefficients of one stage of one (shard, engine)."""

    weights: float
    graphs: float
    runtime: float
    activation: ActivationCost
    kv: StageKv


def stage_costs(model: ModelSpec, shard: Shard, rules: MemoryRules) -> tuple[StageCost, ...]:
    """Distinct stages of a shard (equal ones once)."""
    tp, pp, adp = shard.tensor_parallel, shard.pipeline_parallel, shard.attention_data_parallel
    weights = stage_weights_bytes(model, shard.precision, tp, pp, shard.expert_parallel, adp, rules)
    caches = stages_kv(model, shard.kv_dtype, tp, pp, adp, rules)
    runtime = shard_runtime_bytes(rules, shard)
    found: dict[tuple[object, ...], StageCost] = {}
    for i, size in enumerate(stage_sizes(len(model.layers), pp)):
        kv, last = caches[i], i == pp - 1
        key = (weights[i], size, last, kv.full_block_bytes, kv.fixed_bytes, kv.windows)
        if key not in found:
            act = activation_cost(model, shard.precision.name, tp, adp, last, rules)
            found[key] = StageCost(weights[i], graphs_bytes(rules, model, tp, size), runtime, act, kv)
    return tuple(found.values())


_COLUMNS = 12
_W, _G, _R, _BODY, _LIVE, _WORK, _SAMP, _FIX, _BLOCK, _FULL, _KFIX, _GRP = range(_COLUMNS)


def _row(c: StageCost) -> list[float]:
    a, k = c.activation, c.kv
    return [
        c.weights,
        c.graphs,
        c.runtime,
        a.body_per_token,
        a.live_per_token,
        a.workspace_per_token,
        a.sampler_per_sequence,
        a.fixed,
        k.block_tokens,
        k.full_block_bytes,
        k.fixed_bytes,
        k.group_bytes,
    ]


class _Tables:
    """Tables of shape (pairs, stages, columns) and (pairs, stages, most windows, 3), padded with repeats."""

    def __init__(self, costs: list[tuple[StageCost, ...]]) -> None:
        self.stages = max(len(c) for c in costs)
        padded = [[c[min(i, len(c) - 1)] for i in range(self.stages)] for c in costs]
        self.values = np.array([[_row(s) for s in stages] for stages in padded])
        most = max((len(s.kv.windows) for stages in padded for s in stages), default=0)
        empty = WindowCost(1, True, 0.0)
        self.windows = np.array(
            [
                [
                    [
                        (w.window - (not w.chunked), not w.chunked, w.block_bytes)
                        for w in (*s.kv.windows, *[empty] * (most - len(s.kv.windows)))
                    ]
                    for s in stages
                ]
                for stages in padded
            ],
            dtype=np.float64,
        ).reshape(len(costs), self.stages, most, 3)


def _sequence(v: FloatArray, w: FloatArray, tokens: FloatArray | float, in_flight: FloatArray) -> FloatArray:
    """sequence_bytes of kv_cache.py with gathered coefficients: v (columns, rows), w (rows, windows, 3)."""
    total = np.ceil(tokens / v[_BLOCK]) * v[_FULL] + v[_KFIX]
    for i in range(w.shape[1]):
        held = np.minimum(w[:, i, 0] + in_flight, tokens)
        total += (np.ceil(held / v[_BLOCK]) + w[:, i, 1]) * w[:, i, 2]
    return np.asarray(total, dtype=np.float64)


def _budget(rules: Sequence[MemoryRules], share: float | None) -> FloatArray:
    """(share of total, is share of free, reserve, activations outside, graphs inside) per pair."""
    return np.array(
        [
            [
                r.default_share if share is None else share,
                r.budget == "share_of_free",
                r.reserve_share,
                r.activation.outside_budget,
                r.graphs_in_budget,
            ]
            for r in rules
        ],
        dtype=np.float64,
    )


@dataclass(frozen=True)
class MemoryTable:
    """Memory coefficients of pairs (shard, engine), made once and read by every pass over the rows.

    Shards that differ only in the GPU share their coefficients. row_of: coefficients of each pair; usable: bytes of
    its GPU.
    """

    coefficients: _Tables
    budget: FloatArray
    row_of: IntArray
    usable: FloatArray


def memory_table(
    model: ModelSpec,
    shards: Sequence[Shard],
    engines: Sequence[EngineSpec],
    pairs: Sequence[tuple[int, int]],
    memory_share: float | None = None,
) -> MemoryTable:
    """The table of pairs given as (shard, engine) indices."""
    rules = [memory_rules(e.constants, e.version) for e in engines]
    seen: dict[tuple[object, ...], int] = {}
    costs: list[tuple[StageCost, ...]] = []
    used: list[MemoryRules] = []
    row_of = np.empty(len(pairs), dtype=np.int64)
    keys = [_coefficient_key(s) for s in shards]
    for i, (s, e) in enumerate(pairs):
        at = seen.setdefault((e, keys[s]), len(costs))
        if at == len(costs):
            costs.append(stage_costs(model, shards[s], rules[e]))
            used.append(rules[e])
        row_of[i] = at
    usable = np.array([s.gpu.usable_gib * GIB for s in shards])[np.array([s for s, _ in pairs], dtype=np.int64)]
    return MemoryTable(_Tables(costs), _budget(used, memory_share), row_of, usable)


def _coefficient_key(s: Shard) -> tuple[object, ...]:
    """What the coefficients of a shard depend on: everything but the GPU."""
    kind = s.tensor_link.kind if s.tensor_link else ""
    return (
        s.precision.name,
        s.kv_dtype.name,
        s.tensor_parallel,
        s.pipeline_parallel,
        s.expert_parallel,
        s.attention_data_parallel,
        kind,
    )


def serving_memory(
    model: ModelSpec, shards: Sequence[Shard], engines: Sequence[EngineSpec], rows: ServingRows
) -> ServingMemory:
    """Memory of every row; table_memory over the pairs that the rows use."""
    pair, inverse = np.unique(rows.shard.astype(np.int64) * len(engines) + rows.engine, return_inverse=True)
    pairs = [(int(p) // len(engines), int(p) % len(engines)) for p in pair]
    return table_memory(memory_table(model, shards, engines, pairs, rows.memory_share), inverse, rows)


def table_memory(table: MemoryTable, pair: IntArray, rows: ServingRows) -> ServingMemory:
    """Memory of every row; pair: its position in the table (rows.shard, engine and memory_share are not looked at).

    Budget rules: share of total (vLLM, SGLang): KV = share x total - weights - activations - runtime (- graphs where
    the version counts them); share of free (TensorRT-LLM): KV = share x (total - all else); SGLang leaves
    activations and graphs outside its share; the rest keep a reserve. Sources in engines/memory.yaml.
    """
    at = table.row_of[pair]
    budget, usable = np.take(table.budget.T, at, axis=1), table.usable[pair]
    in_flight = rows.max_num_batched_tokens.astype(np.float64)
    seqs = np.minimum(rows.max_num_seqs, rows.max_num_batched_tokens)
    best: dict[str, FloatArray] = {}
    for stage in range(table.coefficients.stages):
        v, w = np.take(table.coefficients.values[:, stage].T, at, axis=1), table.coefficients.windows[:, stage][at]
        part = _stage(v, w, rows, usable, budget, in_flight, seqs)
        if not best:
            best = part
            continue
        tighter = part["tokens"] < best["tokens"]
        fuller = part["required"] - part["capacity"] > best["required"] - best["capacity"]
        for name in ("pool", "tokens", "budget"):
            best[name] = np.where(tighter, part[name], best[name])
        for name in ("weights", "activation", "runtime", "graphs", "needed", "required", "capacity"):
            best[name] = np.where(fuller, part[name], best[name])
    return ServingMemory(
        usable,
        best["budget"],
        best["weights"],
        best["activation"],
        best["runtime"],
        best["graphs"],
        best["pool"],
        best["tokens"],
        best["needed"],
        best["required"],
        best["capacity"],
    )


def _stage(
    v: FloatArray,
    w: FloatArray,
    rows: ServingRows,
    usable: FloatArray,
    budget: FloatArray,
    in_flight: FloatArray,
    seqs: IntArray,
) -> dict[str, FloatArray]:
    """Every quantity of one stage, shape (rows,)."""
    share, of_free, reserve, outside, graphs_in = budget
    act = np.maximum(in_flight * v[_BODY], seqs * v[_SAMP] + in_flight * v[_LIVE]) + in_flight * v[_WORK] + v[_FIX]
    inside = v[_W] + v[_R] + np.where(outside > 0, 0.0, act) + np.where(graphs_in > 0, v[_G], 0.0)
    all_of_it = v[_W] + v[_R] + act + v[_G]
    limit = usable * (1 - reserve)
    left = np.where(of_free > 0, share * (limit - inside), np.minimum(share, 1 - reserve) * usable - inside)
    pool = np.maximum(np.minimum(left, limit - all_of_it), 0.0)
    one = _sequence(v, w, np.asarray(rows.tokens_per_sequence, dtype=np.float64), in_flight)
    longest = _sequence(v, w, np.asarray(rows.max_model_len, dtype=np.float64), in_flight)
    needed = np.maximum(rows.max_num_seqs * one, longest)
    return {
        "weights": v[_W],
        "activation": act,
        "runtime": v[_R],
        "graphs": v[_G],
        "pool": pool,
        "tokens": pool / one * rows.tokens_per_sequence,
        "budget": inside + pool,
        "needed": needed,
        "required": all_of_it + needed,
        "capacity": np.minimum(limit, all_of_it + left),
    }

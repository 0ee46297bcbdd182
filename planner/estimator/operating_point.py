"""Where each (shard, engine) pair works: how many replicas carry the load, and how many sequences each one runs.

Everything is monotone: more replicas mean less load on each, and no latency rises. So the fewest replicas that keep
every latency limit are found by bisection over all pairs at once, with the one estimator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.engines.records import EngineSpec
from planner.errors import PlannerError
from planner.estimator.intervals import Margins
from planner.estimator.memory.serving import MemoryTable, ServingMemory, ServingRows, table_memory
from planner.estimator.time.curves import ServingCurves
from planner.estimator.time.serving import LoadRows, ServingTime, row_curves, time_under_load
from planner.estimator.time.steps import StepTable
from planner.models.spec import ModelSpec
from planner.request import Limits, Workload
from planner.space.shard import Shard

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

SEQUENCE_GRID = np.array([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024], dtype=np.int64)
MAX_REPLICAS = 512
MAX_LOAD = 0.999
IDLE_FRACTION = 1e-6


@dataclass(frozen=True)
class Settings:
    """Engine settings common to all candidates of a request (tokens)."""

    max_model_len: int
    max_num_batched_tokens: int
    tokens_per_sequence: int
    max_num_seqs: int | None = None

    def step_tokens(self, engine: EngineSpec) -> int:
        """Most tokens of a step of this engine: max_num_batched_tokens, or the longest prompt where a step must hold it whole."""
        return max(self.max_num_batched_tokens, self.max_model_len if engine.whole_prompts else 0)


@dataclass(frozen=True)
class Pairs:
    """The (shard, engine) pairs under study, as index arrays into shards and engines. groups: attention groups of a replica.

    speed, first, size: measured / predicted of TPOT, TTFT and memory without the cache by pair (planner.estimator.corrections), None where nothing was measured.
    """

    model: ModelSpec
    shards: Sequence[Shard]
    engines: Sequence[EngineSpec]
    shard: IntArray
    engine: IntArray
    settings: Settings
    workload: Workload
    groups: IntArray
    memory_table: MemoryTable | None
    curves: ServingCurves | None
    curve_of: IntArray | None
    margins: Margins | None = None
    speed: FloatArray | None = None
    first: FloatArray | None = None
    size: FloatArray | None = None

    def step_tokens(self, which: IntArray) -> IntArray:
        """Most tokens of a step of an attention group of the pairs `which`."""
        by_engine = np.array([self.settings.step_tokens(engine) for engine in self.engines], dtype=np.int64)
        return by_engine[self.engine[which]]

    def judged(self, which: IntArray, time: ServingTime) -> ServingTime:
        """What limits are held against: the time itself, or the bad end of its range where the pairs carry margins."""
        m = self.margins
        if m is None:
            return time
        capacity = time.max_rate_per_s * m.capacity[which]
        return replace(
            time,
            ttft_p95_s=time.ttft_p95_s * m.ttft[which],
            tpot_s=time.tpot_s * m.tpot[which],
            e2e_s=time.e2e_s * m.e2e[which],
            max_rate_per_s=capacity,
            stable=time.stable & (time.utilisation <= m.capacity[which])
            if self.workload.concurrency is None
            else time.stable,
        )

    def memory(self, which: IntArray, max_num_seqs: IntArray) -> ServingMemory:
        """Memory of the pairs `which` with so many sequences in each attention group."""
        if self.memory_table is None:
            raise PlannerError("there are no pairs to estimate")
        rows = ServingRows(
            shard=self.shard[which],
            engine=self.engine[which],
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.step_tokens(which),
            max_model_len=self.settings.max_model_len,
            tokens_per_sequence=self.settings.tokens_per_sequence,
        )
        memory = table_memory(self.memory_table, which, rows)
        return memory if self.size is None else corrected_memory(memory, self.size[which])

    def time(self, which: IntArray, load: FloatArray, cap: IntArray) -> ServingTime:
        """Latency and throughput of the pairs `which`, each replica under `load` (requests/s, or users when the workload says so).

        cap: most running sequences of an attention group.
        """
        if self.curves is None or self.curve_of is None:
            raise PlannerError("there are no pairs to time")
        by_users = self.workload.concurrency is not None
        slower = None if self.speed is None else self.speed[which]
        if slower is not None and not by_users:
            load = load * slower
        rows = self._load_rows(which, None if by_users else load, load if by_users else None, cap * self.groups[which])
        time = time_under_load(self.curves, self.curve_of[which], rows, self.workload)
        if slower is None or self.first is None:
            return time
        return corrected_time(time, slower, self.first[which], float(self.workload.output_tokens))

    def _load_rows(
        self, which: IntArray, rate: FloatArray | None, users: FloatArray | None, cap: IntArray | None
    ) -> LoadRows:
        return LoadRows(self.shard[which], self.engine[which], rate, users, self.step_tokens(which), cap)

    def timed(self, which: IntArray, shards: Sequence[Shard], shard: IntArray, table: StepTable) -> Pairs:
        """The same pairs with the curves of the pairs `which`; shards and shard: those of the step table."""
        pairs = replace(self, shards=shards, shard=shard)
        none = np.zeros(len(which))
        by_users = self.workload.concurrency is not None
        rows = pairs._load_rows(which, None if by_users else none, none if by_users else None, None)
        curves = row_curves(table, self.engines, rows, self.workload)
        curve_of = np.zeros(len(shard), dtype=np.int64)
        curve_of[which] = curves.row
        return replace(pairs, curves=curves, curve_of=curve_of)


def corrected_memory(memory: ServingMemory, size: FloatArray) -> ServingMemory:
    """Weights, activations and runtime together multiplied with what was measured; the difference shows as runtime and leaves the cache."""
    more = (size - 1) * (memory.weights_bytes + memory.activation_bytes + memory.runtime_bytes + memory.graphs_bytes)
    pool = np.maximum(memory.kv_pool_bytes - more, 0.0)
    share = np.where(memory.kv_pool_bytes > 0, pool / np.maximum(memory.kv_pool_bytes, 1.0), 1.0)
    return replace(
        memory,
        runtime_bytes=memory.runtime_bytes + more,
        required_bytes=memory.required_bytes + more,
        kv_pool_bytes=pool,
        kv_pool_tokens=np.floor(memory.kv_pool_tokens * share),
    )


def corrected_time(time: ServingTime, tpot: FloatArray, ttft: FloatArray, output_tokens: float) -> ServingTime:
    """Times multiplied with what was measured: a replica that is f times slower under a rate r is as busy as one under f r.

    `time` is that of the rate f r, f = tpot; its rates are divided by f again. TTFT is f times longer too, and has a factor of its own
    (ttft) for what is left after that.
    """
    ttft = ttft * tpot
    decode = (output_tokens - 1) * time.tpot_s
    with np.errstate(invalid="ignore"):
        e2e = np.where(np.isfinite(time.e2e_s), (time.e2e_s - decode) * ttft + decode * tpot, np.inf)
    return replace(
        time,
        ttft_mean_s=time.ttft_mean_s * ttft,
        ttft_p95_s=time.ttft_p95_s * ttft,
        tpot_s=time.tpot_s * tpot,
        e2e_s=e2e,
        output_tokens_per_s=time.output_tokens_per_s / tpot,
        max_rate_per_s=time.max_rate_per_s / tpot,
    )


def grid_at_least(count: FloatArray) -> IntArray:
    """The smallest max_num_seqs of the grid that holds `count` sequences (the grid's end when none does)."""
    at = np.searchsorted(SEQUENCE_GRID, np.ceil(np.minimum(count, SEQUENCE_GRID[-1]) - 1e-9), side="left")
    return np.asarray(SEQUENCE_GRID[np.minimum(at, len(SEQUENCE_GRID) - 1)])


def most_sequences(pairs: Pairs, which: IntArray) -> IntArray:
    """The largest max_num_seqs of the grid whose memory fits, by bisection; 0 where not even one sequence fits."""
    low = np.full(len(which), -1, dtype=np.int64)
    high = np.full(len(which), len(SEQUENCE_GRID), dtype=np.int64)
    while np.any(high - low > 1):
        middle = np.clip((low + high) // 2, 0, len(SEQUENCE_GRID) - 1)
        memory = pairs.memory(which, SEQUENCE_GRID[middle])
        fits = memory.required_bytes <= memory.capacity_bytes
        open_ = high - low > 1
        low = np.where(open_ & fits, middle, low)
        high = np.where(open_ & ~fits, middle, high)
    return np.where(low >= 0, SEQUENCE_GRID[np.maximum(low, 0)], 0)


def keeps_limits(time: ServingTime, limits: Limits) -> BoolArray:
    """True where the load is carried and every latency limit holds."""
    good: BoolArray = time.stable.copy()
    for value, limit in ((time.ttft_p95_s, limits.ttft_s), (time.tpot_s, limits.tpot_s), (time.e2e_s, limits.e2e_s)):
        if limit is not None:
            good &= value <= limit
    return good


def total_load(workload: Workload) -> float:
    """The whole load: requests per second, or users."""
    if workload.concurrency is not None:
        return float(workload.concurrency)
    return workload.rate_per_s or 0.0


def load_per_replica(workload: Workload, replicas: IntArray) -> FloatArray:
    """Load of the busiest replica: rate is divided evenly, users in whole numbers."""
    if workload.concurrency is not None:
        return np.ceil(workload.concurrency / replicas)
    return np.asarray(total_load(workload) / replicas)


def fewest_replicas_for_load(pairs: Pairs, which: IntArray, cap: IntArray) -> IntArray:
    """The fewest replicas whose capacity carries the load (MAX_REPLICAS + 1 where even those do not)."""
    if pairs.workload.concurrency is not None:
        need = np.ceil(pairs.workload.concurrency / np.maximum(cap * pairs.groups[which], 1))
    else:
        idle = pairs.time(which, np.full(len(which), total_load(pairs.workload) * IDLE_FRACTION), cap)
        with np.errstate(divide="ignore"):
            need = np.ceil(total_load(pairs.workload) / (MAX_LOAD * pairs.judged(which, idle).max_rate_per_s))
    bounded = np.clip(np.nan_to_num(need, nan=MAX_REPLICAS + 1, posinf=MAX_REPLICAS + 1), 1, MAX_REPLICAS + 1)
    return np.asarray(bounded, dtype=np.int64)


def fewest_replicas_within_limits(
    pairs: Pairs, which: IntArray, cap: IntArray, at_least: IntArray, limits: Limits
) -> IntArray:
    """The fewest replicas (>= at_least) that keep every latency limit; MAX_REPLICAS + 1 where no number does."""
    result = np.full(len(which), MAX_REPLICAS + 1, dtype=np.int64)

    def good(where: IntArray, replicas: IntArray, slots: IntArray) -> BoolArray:
        time = pairs.time(where, load_per_replica(pairs.workload, replicas), slots)
        return keeps_limits(pairs.judged(where, time), limits)

    ok = good(which, at_least, cap)
    result[ok] = at_least[ok]
    rest = np.flatnonzero(~ok & (at_least < MAX_REPLICAS))
    if not len(rest):
        return result
    most = np.full(len(rest), MAX_REPLICAS, dtype=np.int64)
    rest = rest[good(which[rest], most, cap[rest])]
    low, high = at_least[rest].copy(), np.full(len(rest), MAX_REPLICAS, dtype=np.int64)
    while np.any(high - low > 1):
        middle = (low + high) // 2
        ok = good(which[rest], middle, cap[rest])
        high, low = np.where(ok, middle, high), np.where(ok, low, middle)
    result[rest] = high
    return result


def take(record: Any, index: Any) -> Any:
    """A record of equal-length arrays, at the given rows."""
    return type(record)(**{f.name: getattr(record, f.name)[index] for f in fields(record)})


def concatenate(records: Sequence[Any]) -> Any:
    """Records of equal-length arrays, one after the other."""
    kind = type(records[0])
    return kind(**{f.name: np.concatenate([getattr(r, f.name) for r in records]) for f in fields(kind)})

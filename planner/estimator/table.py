"""The table the solver reads: one row per (hardware class, layout, precision, KV dtype, engine, replicas, sequences).

Built from the one estimator in a few vectorised passes. Rows that miss a limit narrowly stay in, so that the solver can
say what binds; rows that are hopeless or dominated are counted and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.estimator.operating_point import (
    MAX_REPLICAS,
    SEQUENCE_GRID,
    BoolArray,
    FloatArray,
    IntArray,
    Pairs,
    concatenate,
    fewest_replicas_for_load,
    fewest_replicas_within_limits,
    grid_at_least,
    keeps_limits,
    load_per_replica,
    most_sequences,
    take,
)
from planner.request import Goal, Limits

NEAR_MISS = 1.25
FASTEST_STEPS = (1, 1.25, 1.5, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class PairRows:
    """Operating points of pairs, equal-length arrays. replicas is the fewest for this point (throughput: at least 1).

    time columns in s, tokens/s of one replica; memory in bytes on the fullest GPU.
    """

    pair: IntArray
    replicas: IntArray
    max_num_seqs: IntArray
    ttft_p95_s: FloatArray
    tpot_s: FloatArray
    e2e_s: FloatArray
    output_tokens_per_s: FloatArray
    utilisation: FloatArray
    max_rate_per_s: FloatArray
    stable: BoolArray
    required_bytes: FloatArray
    capacity_bytes: FloatArray

    def __len__(self) -> int:
        return len(self.pair)


def hopeless(pairs: Pairs, near_miss: float) -> BoolArray:
    """True where one sequence alone needs more than near_miss times the memory there is."""
    everything = np.arange(len(pairs.shard))
    one = pairs.memory(everything, np.ones(len(everything), dtype=np.int64))
    return np.asarray(one.required_bytes > near_miss * one.capacity_bytes)


def operating_rows(pairs: Pairs, which: IntArray, replicas: IntArray, cap: IntArray, fits: BoolArray) -> PairRows:
    """Rows for pairs run with so many replicas each.

    max_num_seqs is the most that fits, so that a burst finds room and the capacity holds; where not even one sequence
    fits (fits False) it is what the planned load needs, which says how much memory is missing.
    """
    load = load_per_replica(pairs.workload, replicas)
    time = pairs.time(which, load, cap)
    if pairs.settings.max_num_seqs is not None:
        seqs = np.full(len(which), pairs.settings.max_num_seqs, dtype=np.int64)
    else:
        running = np.nan_to_num(time.peak_running, nan=1.0, posinf=1e9) / pairs.groups[which]
        seqs = np.where(fits, cap, np.minimum(grid_at_least(running), cap))
    return _rows(pairs, which, replicas, seqs, time)


def _rows(pairs: Pairs, which: IntArray, replicas: IntArray, seqs: IntArray, time: object) -> PairRows:
    memory = pairs.memory(which, seqs)
    columns = {
        k: getattr(time, k)
        for k in ("ttft_p95_s", "tpot_s", "e2e_s", "output_tokens_per_s", "utilisation", "max_rate_per_s", "stable")
    }
    return PairRows(
        pair=which,
        replicas=replicas,
        max_num_seqs=seqs,
        required_bytes=np.asarray(memory.required_bytes, dtype=np.float64),
        capacity_bytes=np.asarray(memory.capacity_bytes, dtype=np.float64),
        **columns,
    )


def rows_for_load(
    pairs: Pairs, alive: IntArray, limits: Limits, goal: Goal, pinned_replicas: int | None = None
) -> PairRows:
    """Rows for a fixed load: the fewest replicas that carry it, the fewest that also keep the latency limits, one less
    than those (what just fails); for `fastest` also more replicas than needed. pinned_replicas: that number alone."""
    fitting = (
        most_sequences(pairs, alive)
        if pairs.settings.max_num_seqs is None
        else np.full(len(alive), pairs.settings.max_num_seqs)
    )
    fits = fitting > 0
    cap = np.where(fits, fitting, SEQUENCE_GRID[-1]).astype(np.int64)
    if pinned_replicas is not None:
        return operating_rows(pairs, alive, np.full(len(alive), pinned_replicas, dtype=np.int64), cap, fits)
    carry = fewest_replicas_for_load(pairs, alive, cap)
    able = np.flatnonzero(carry <= MAX_REPLICAS)
    alive, cap, carry, fits = alive[able], cap[able], carry[able], fits[able]
    within = fewest_replicas_within_limits(pairs, alive, cap, carry, limits)
    wanted: list[tuple[IntArray, IntArray]] = [(np.arange(len(alive)), carry)]
    more = np.flatnonzero((within <= MAX_REPLICAS) & (within > carry))
    wanted.append((more, within[more]))
    just_fails = np.flatnonzero((within <= MAX_REPLICAS) & (within > carry + 1))
    wanted.append((just_fails, within[just_fails] - 1))
    if goal == "fastest":
        good = np.flatnonzero(within <= MAX_REPLICAS)
        for step in FASTEST_STEPS[1:]:
            replicas = np.maximum(np.ceil(within[good] * step).astype(np.int64), within[good] + 1)
            keep = replicas <= MAX_REPLICAS
            wanted.append((good[keep], replicas[keep]))
    made = [operating_rows(pairs, alive[at], replicas, cap[at], fits[at]) for at, replicas in wanted if len(at)]
    return concatenate(made) if made else empty_rows()


def rows_at_saturation(pairs: Pairs, alive: IntArray, limits: Limits) -> PairRows:
    """Rows for the throughput goal: a closed loop keeps the replica full with as many users as the grid allows.

    Of each pair: the number of users that gives most tokens within the latency limits, the one that gives most without
    them, and a single user.
    """
    fitting = most_sequences(pairs, alive)
    made = []
    for users in SEQUENCE_GRID:
        here = alive[(fitting >= users) | ((fitting == 0) & (users == 1))]
        if len(here):
            seqs = np.full(len(here), users, dtype=np.int64)
            time = pairs.time(here, (seqs * pairs.groups[here]).astype(np.float64), seqs)
            kept = keeps_limits(pairs.judged(here, time), limits)
            made.append((here, seqs, time.output_tokens_per_s, kept))
    if not made:
        return empty_rows()
    pair, seqs, tokens, kept = (np.concatenate(column) for column in zip(*made, strict=True))
    wanted = {
        *_best_of_each(pair, np.where(kept, tokens, -1.0)),
        *_best_of_each(pair, tokens),
        *np.flatnonzero(seqs == 1),
    }
    at = np.array(sorted(int(w) for w in wanted), dtype=np.int64)
    time = pairs.time(pair[at], (seqs[at] * pairs.groups[pair[at]]).astype(np.float64), seqs[at])
    return _rows(pairs, pair[at], np.ones(len(at), dtype=np.int64), seqs[at], time)


def _best_of_each(pair: IntArray, value: FloatArray) -> IntArray:
    """Position of the largest value of each pair."""
    order = np.lexsort((-value, pair))
    first = np.concatenate([[True], pair[order][1:] != pair[order][:-1]])
    return np.asarray(order[first])


def empty_rows() -> PairRows:
    """No rows at all."""
    i, f = np.zeros(0, dtype=np.int64), np.zeros(0)
    return PairRows(i, i, i, f, f, f, f, f, f, np.zeros(0, dtype=np.bool_), f, f)


__all__ = [
    "NEAR_MISS",
    "PairRows",
    "empty_rows",
    "hopeless",
    "operating_rows",
    "rows_at_saturation",
    "rows_for_load",
    "take",
]

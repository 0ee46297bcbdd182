"""Latency and throughput of a replica under load: rows of any load read from the curves of curves.py.

Open loop: Poisson arrivals. Closed loop: N users, one request each, C = request overhead + TTFT + (o - 1) TPOT, rate = N / C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.engines.records import EngineSpec
from planner.estimator.time.curves import MOST, ServingCurves, serving_curves
from planner.estimator.time.queueing import peak, slot_wait_s, tail_s
from planner.estimator.time.steps import StepTable
from planner.estimator.time.surfaces import FloatArray, IntArray
from planner.request import Workload

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LoadRows:
    """R rows to time: indices into the shards and engines, the load of one replica (exactly one of the two), its limits.

    max_num_batched_tokens: of an attention group, as engines count it; max_num_seqs: of the whole replica, None = no cap on running sequences.
    """

    shard: IntArray
    engine: IntArray
    rate_per_s: FloatArray | None
    concurrency: FloatArray | None
    max_num_batched_tokens: IntArray
    max_num_seqs: IntArray | None = None


@dataclass(frozen=True)
class ServingTime:
    """Per row (R,): latencies in seconds, tokens/s of the replica at this load, sequences decoding (mean and about p99),
    utilisation 0..1, requests/s it could take at most, and whether the load is stable. Latencies are inf where it is not.
    """

    ttft_mean_s: FloatArray
    ttft_p95_s: FloatArray
    tpot_s: FloatArray
    e2e_s: FloatArray
    output_tokens_per_s: FloatArray
    running: FloatArray
    peak_running: FloatArray
    utilisation: FloatArray
    max_rate_per_s: FloatArray
    stable: BoolArray


def _locate(curve: FloatArray, row: IntArray, target: FloatArray) -> tuple[IntArray, FloatArray]:
    """Flat index of the left grid point and the fraction towards the next, per row, for rising curves (U, G)."""
    width = curve.shape[1]
    flat, base = curve.ravel(), row * width
    low = np.zeros(len(row), dtype=np.int64)
    step = 1 << (width - 1).bit_length() - 1
    while step:
        probe = low + step
        take = (probe < width - 1) & (flat[base + np.minimum(probe, width - 1)] <= target)
        low = np.where(take, probe, low)
        step >>= 1
    left, right = flat[base + low], flat[base + low + 1]
    fraction = np.where(right > left, (target - left) / np.where(right > left, right - left, 1.0), 0.0)
    return base + low, np.clip(fraction, 0.0, 1.0)


def _at(curve: FloatArray, where: IntArray, fraction: FloatArray) -> FloatArray:
    flat = curve.ravel()
    left = flat[where]
    return np.asarray(left + fraction * (flat[where + 1] - left))


def row_curves(table: StepTable, engines: Sequence[EngineSpec], rows: LoadRows, workload: Workload) -> ServingCurves:
    """Curves of all rows; they do not depend on how much load, so any load of these rows is read from them."""
    closed = rows.rate_per_s is None
    return serving_curves(table, engines, (rows.shard, rows.engine, rows.max_num_batched_tokens), (workload, closed))


def serving_time(table: StepTable, engines: Sequence[EngineSpec], rows: LoadRows, workload: Workload) -> ServingTime:
    """Latency, throughput and stability of every row. Shapes (R,); seconds; equations in curves.py and queueing.py."""
    curves = row_curves(table, engines, rows, workload)
    return time_under_load(curves, curves.row, rows, workload)


def time_under_load(curves: ServingCurves, row: IntArray, rows: LoadRows, workload: Workload) -> ServingTime:
    """The load of `rows` on the curves numbered `row` (shard, engine and token budget of rows are not looked at)."""
    v = curves.values
    cap = np.full(len(row), MOST) if rows.max_num_seqs is None else np.minimum(rows.max_num_seqs, MOST).astype(float)
    where, fraction = _locate(v["sequences"], row, cap)
    by_slots = cap < v["sequences"][row, -1]
    limit = _Limit(where, fraction, _at(v["rate"], where, fraction), _at(v["sequences"], where, fraction), by_slots, curves.request_s[row])  # fmt: skip
    if rows.rate_per_s is not None:
        return _open_loop(v, row, (rows.rate_per_s, limit), workload)
    if rows.concurrency is None:
        raise ValueError("LoadRows needs rate_per_s or concurrency")
    return _closed_loop(v, row, (rows.concurrency.astype(float), limit), workload)


@dataclass(frozen=True)
class _Limit:
    """Where each row's curve ends: grid point and fraction, capacity in requests/s, sequences, whether slots end it (else steps full
    of prompt tokens do); request overhead."""

    where: IntArray
    fraction: FloatArray
    rate: FloatArray
    sequences: FloatArray
    by_slots: BoolArray
    request_s: FloatArray


def _open_loop(
    v: dict[str, FloatArray], row: IntArray, load: tuple[FloatArray, _Limit], workload: Workload
) -> ServingTime:
    """Poisson arrivals at a rate per replica."""
    rate, limit = load
    stable = rate < limit.rate
    carried = np.minimum(rate, limit.rate)
    where, fraction = _locate(v["rate"], row, carried)
    n, tpot, ttft, p95, stay = (_at(v[k], where, fraction) for k in ("sequences", "tpot", "ttft", "p95", "stay"))
    used = carried / limit.rate
    slots = np.maximum(limit.sequences, 1.0)
    slot = np.where(limit.by_slots, slot_wait_s(used, slots, stay), 0.0)
    mean = limit.request_s + ttft + slot
    high = np.maximum(limit.request_s + p95 + tail_s(slot, used), mean)
    bad = np.where(stable, 0.0, np.inf)
    e2e = mean + (workload.output_tokens - 1) * tpot
    tokens = carried * workload.output_tokens
    return ServingTime(mean + bad, high + bad, tpot + bad, e2e + bad, tokens, n, np.minimum(peak(n), slots), used, limit.rate, stable)  # fmt: skip


def _closed_loop(
    v: dict[str, FloatArray], row: IntArray, load: tuple[FloatArray, _Limit], workload: Workload
) -> ServingTime:
    """A fixed number of users, one request each; always stable. No more than the capacity leaves: C >= users / capacity, so that
    users beyond the slots, or beyond full steps, wait in turn."""
    users, limit = load
    most = _at(v["users"], limit.where, limit.fraction)
    where, fraction = _locate(v["users"], row, np.minimum(users, most))
    n, tpot, ttft, stay = (_at(v[k], where, fraction) for k in ("sequences", "tpot", "ttft", "stay"))
    queued = users / limit.rate - _at(v["stay"], limit.where, limit.fraction)
    mean = np.maximum(limit.request_s + ttft, queued)
    rate = np.minimum(users / (mean + stay), limit.rate)
    alone = v["ttft"][:, 0][row]
    e2e = mean + (workload.output_tokens - 1) * tpot
    used = np.minimum(rate / limit.rate, 1.0)
    return ServingTime(mean, mean + np.maximum(mean - limit.request_s - alone, 0.0), tpot, e2e, rate * workload.output_tokens, n,
                       np.minimum(users, np.maximum(limit.sequences, 1.0)), used, limit.rate, np.ones(len(users), dtype=bool))  # fmt: skip

"""Latency and throughput of a replica under load, from the step table.

Continuous batching with chunked prefill, in steady state. With N sequences decoding, d(N) the decode step, c the prompt tokens
a mixed step takes (merged prompts, at most max_num_batched_tokens - N) and T(N, c) the mixed step:

    dP(N)     = (T(N, c) - d(N)) p / c             extra time one prompt of p tokens costs the decoders
    rate(N)   = N / ((o - 1) d(N) + N dP(N))       flow balance: N = rate * stay, stay = (o - 1) TPOT
    TPOT(N)   = d(N) + N dP(N) / (o - 1)
    N         <= (o - 1) (max_num_batched_tokens - N) / p      beyond it every step is full of prompt tokens
    TTFT      = request overhead + wait for the running step + wait behind other prompts + own chunks + wait for a slot

rate(N) is tabulated per (shard, engine, token budget) and inverted by row. Static batching (a batch runs to its end):
cycle(B) = prefill(B p) + (o - 1) d(B), rate(B) = B / cycle(B). Open loop: Poisson arrivals. Closed loop: N users, one request
each, C = rate (TTFT + (o - 1) TPOT).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.engines.records import EngineSpec
from planner.estimator.time.engine_time import EngineTiming, engine_timing
from planner.estimator.time.queueing import QUANTILE, Prefill, closed_wait_s, peak, prefill_wait_s, slot_wait_s, tail_s
from planner.estimator.time.steps import StepTable
from planner.estimator.time.surfaces import FloatArray, IntArray
from planner.models.spec import ModelSpec
from planner.request import Workload

BoolArray = npt.NDArray[np.bool_]
_SEQUENCES = np.array(
    [
        0.02,
        0.1,
        0.25,
        0.5,
        1,
        1.5,
        2,
        3,
        4,
        6,
        8,
        12,
        16,
        24,
        32,
        48,
        64,
        96,
        128,
        192,
        256,
        384,
        512,
        768,
        1024,
        1536,
        2048,
        3072,
        4096,
    ],
    dtype=float,
)
_BLOCK = 1024
_FIELDS = ("sequences", "rate", "tpot", "ttft", "p95", "stay", "closed_ttft", "closed")


@dataclass(frozen=True)
class LoadRows:
    """R rows to time: indices into the shards and engines, the load of one replica (exactly one of the two), its limits.

    Limits are of the whole replica, all attention groups together; max_num_seqs None = no cap on running sequences.
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


@dataclass(frozen=True)
class ServingCurves:
    """U curves over the grid of N: one array (U, G) per quantity, and which curve each row uses."""

    values: dict[str, FloatArray]
    row: IntArray
    request_s: FloatArray


def decode_step_s(
    table: StepTable, timing: EngineTiming, shard: IntArray, engine: IntArray, sequences: FloatArray
) -> FloatArray:
    """Step that decodes `sequences` sequences and prefills nothing; each pipeline stage holds its share of them.

    Whatever the engine's fitted efficiency, reading the active weights once is the floor.
    """
    part = sequences / table.pipeline[shard]
    kernels = (table.tokens_time_s(shard, part) + table.decode_time_s(shard, part)) / timing.decode_efficiency[engine]
    kernels = np.maximum(kernels, table.floor_s[shard])
    eager = table.kernels[shard] * timing.launch_s[engine] * (1 - timing.graphs[engine])
    return np.asarray(np.maximum(kernels, eager) + timing.step_s[engine] + timing.sequence_s[engine] * sequences)


def mixed_extra_s(
    table: StepTable, timing: EngineTiming, shard: IntArray, engine: IntArray, load: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """What `chunk` prompt tokens add to a step with `sequences` decoders (load = sequences, chunk), per pass of the pipeline."""
    part = load[0] / table.pipeline[shard]
    more = table.tokens_time_s(shard, part + load[1]) - table.tokens_time_s(shard, part)
    return np.asarray(
        (np.maximum(more, 0.0) + load[1] * table.prefill_attention_s[shard]) / timing.prefill_efficiency[engine]
    )


def _continuous(table: StepTable, timing: EngineTiming, keys: IntArray, workload: Workload) -> dict[str, FloatArray]:
    """Curves of continuous batching for U keys (shard, engine, token budget), (U, G)."""
    shape = (len(keys), len(_SEQUENCES))
    shard, engine = np.broadcast_to(keys[:, :1], shape), np.broadcast_to(keys[:, 1:2], shape)
    stages = table.pipeline[shard]
    p = float(workload.input_tokens)
    steps = max(float(workload.output_tokens) - 1.0, 1.0)  # a one-token answer still takes a step
    budget = np.maximum(keys[:, 2:3].astype(float), 16.0)
    # beyond (o - 1) budget / (p + o - 1) sequences every step is full of prompt tokens: the population stops there
    n = np.minimum(np.broadcast_to(_SEQUENCES, shape), np.maximum(steps * budget * stages / (p + steps), 0.01))
    room = np.maximum(budget - n / stages, 16.0)
    d = decode_step_s(table, timing, shard, engine, n)

    def extra(tokens: FloatArray) -> FloatArray:
        return mixed_extra_s(table, timing, shard, engine, (n, tokens))

    chunk = np.minimum(room, p * np.maximum(1.0, n / steps))  # prompts that wait together share a step
    cost = extra(chunk) * p / chunk / stages
    rate = np.maximum.accumulate(n / (steps * d + n * cost), axis=1)
    tpot = np.maximum.accumulate(d + n * cost / steps, axis=1)
    single = np.minimum(room, p)
    chunks = p / single
    own = (d + extra(single)) * (1 + (chunks - 1) / stages)
    full_step = d + extra(room)
    prefill = Prefill(step_s=d, mean_step_s=tpot, cost_s=cost, own_s=own, busy=1 - np.exp(-n - rate * own),
                      load=np.minimum(rate * full_step * p / room / stages, 1.0), full_step_s=full_step, share=p / room)  # fmt: skip
    mean, high = prefill_wait_s(prefill)
    closed = closed_wait_s(prefill)
    curves = {"sequences": n, "rate": rate, "tpot": tpot, "ttft": own + mean, "p95": own + high, "stay": steps * tpot,
              "closed_ttft": own + closed, "closed": n + rate * (own + closed)}  # fmt: skip
    return {name: np.maximum.accumulate(value, axis=1) for name, value in curves.items()}


def _static(table: StepTable, timing: EngineTiming, keys: IntArray, workload: Workload) -> dict[str, FloatArray]:
    """Curves of static batching: a batch of B is prefilled whole and decoded to its end, (U, G). Below one request at a time
    (B < 1) it is the share of time the engine is busy."""
    shape = (len(keys), len(_SEQUENCES))
    shard, engine = np.broadcast_to(keys[:, :1], shape), np.broadcast_to(keys[:, 1:2], shape)
    n = np.broadcast_to(_SEQUENCES, shape)
    batch = np.maximum(n, 1.0)
    d = decode_step_s(table, timing, shard, engine, batch)
    first = batch_prefill_s(table, timing, shard, engine, (batch, float(workload.input_tokens)))
    cycle = first + (workload.output_tokens - 1) * d
    held = np.minimum(n, 1.0) * cycle
    curves = {"sequences": n, "rate": n / cycle, "tpot": d, "ttft": first + held / 2, "p95": first + QUANTILE * held,
              "stay": cycle - first, "closed_ttft": first, "closed": n}  # fmt: skip
    return {name: np.maximum.accumulate(value, axis=1) for name, value in curves.items()}


def batch_prefill_s(
    table: StepTable, timing: EngineTiming, shard: IntArray, engine: IntArray, load: tuple[FloatArray, float]
) -> FloatArray:
    """Prefill of a whole batch (load = sequences, prompt tokens) in one pass, launched kernel by kernel."""
    batch, tokens = load
    stages = table.pipeline[shard]
    work = (
        table.tokens_time_s(shard, batch * tokens / stages) + batch * tokens / stages * table.prefill_attention_s[shard]
    )
    kernels = work / timing.prefill_efficiency[engine]
    eager = table.kernels[shard] * timing.launch_s[engine]
    return np.asarray(np.maximum(kernels, eager) + timing.step_s[engine] + timing.sequence_s[engine] * batch)


def serving_curves(
    table: StepTable, engines: Sequence[EngineSpec], rows: LoadRows, workload: Workload
) -> ServingCurves:
    """Curves of all rows, made once: they do not depend on the load, so any load of these rows is read from them."""
    timing = engine_timing(engines)
    budgets, which = np.unique(rows.max_num_batched_tokens, return_inverse=True)
    code = (rows.shard * len(engines) + rows.engine) * len(budgets) + which
    unique, row = np.unique(code, return_inverse=True)
    keys = np.stack(
        [
            unique // (len(engines) * len(budgets)),
            unique // len(budgets) % len(engines),
            budgets[unique % len(budgets)],
        ],
        axis=1,
    )
    static = timing.static[keys[:, 1]] > 0
    values = {name: np.empty((len(keys), len(_SEQUENCES))) for name in _FIELDS}
    for chosen, make in ((np.flatnonzero(~static), _continuous), (np.flatnonzero(static), _static)):
        for start in range(0, len(chosen), _BLOCK):  # blocks that stay in the processor's cache
            block = chosen[start : start + _BLOCK]
            for name, value in make(table, timing, keys[block], workload).items():
                values[name][block] = value
    return ServingCurves(values, row.astype(np.int64), timing.request_s[keys[:, 1]])


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


def serving_time(
    model: ModelSpec, table: StepTable, engines: Sequence[EngineSpec], rows: LoadRows, workload: Workload
) -> ServingTime:
    """Latency, throughput and stability of every row. Shapes (R,); seconds; equations in the module's docstring."""
    curves = serving_curves(table, engines, rows, workload)
    return time_under_load(curves, curves.row, rows, workload)


def time_under_load(curves: ServingCurves, row: IntArray, rows: LoadRows, workload: Workload) -> ServingTime:
    """The load of `rows` on the curves numbered `row` (shard, engine and token budget of rows are not looked at)."""
    v = curves.values
    cap = (
        np.full(len(row), _SEQUENCES[-1])
        if rows.max_num_seqs is None
        else np.minimum(rows.max_num_seqs, _SEQUENCES[-1]).astype(float)
    )
    where, fraction = _locate(v["sequences"], row, cap)
    max_rate = _at(v["rate"], where, fraction)
    most_running = _at(v["sequences"], where, fraction)
    request_s = curves.request_s[row]
    if rows.rate_per_s is not None:
        return _open_loop(v, row, (rows.rate_per_s, max_rate, most_running, request_s), workload)
    if rows.concurrency is None:
        raise ValueError("LoadRows needs rate_per_s or concurrency")
    return _closed_loop(v, row, (rows.concurrency.astype(float), max_rate, most_running, request_s), workload)


_Load = tuple[FloatArray, FloatArray, FloatArray, FloatArray]  # rate or users, capacity, most running, request overhead


def _open_loop(v: dict[str, FloatArray], row: IntArray, load: _Load, workload: Workload) -> ServingTime:
    """Poisson arrivals at a rate per replica."""
    rate, max_rate, most, request_s = load
    stable = rate < max_rate
    where, fraction = _locate(v["rate"], row, np.minimum(rate, max_rate))
    n, tpot, ttft, p95, stay = (_at(v[k], where, fraction) for k in ("sequences", "tpot", "ttft", "p95", "stay"))
    used = np.minimum(rate / max_rate, 1.0)
    slot = slot_wait_s(used, np.maximum(most, 1.0), stay)
    mean = request_s + ttft + slot
    high = np.maximum(request_s + p95 + tail_s(slot, used), mean)
    bad = np.where(stable, 0.0, np.inf)
    tokens = np.minimum(rate, max_rate) * workload.output_tokens
    e2e = mean + (workload.output_tokens - 1) * tpot
    return ServingTime(
        mean + bad,
        high + bad,
        tpot + bad,
        e2e + bad,
        tokens,
        n,
        np.minimum(peak(n), np.maximum(most, 1.0)),
        used,
        max_rate,
        stable,
    )


def _closed_loop(v: dict[str, FloatArray], row: IntArray, load: _Load, workload: Workload) -> ServingTime:
    """A fixed number of users, one request each; always stable, more users than slots wait in turn."""
    users, max_rate, most, request_s = load
    where, fraction = _locate(v["closed"], row, users)
    limit, limit_fraction = _locate(v["sequences"], row, most)
    over = where + fraction > limit + limit_fraction
    where, fraction = np.where(over, limit, where), np.where(over, limit_fraction, fraction)
    n, tpot, own, rate, stay = (
        _at(v[k], where, fraction) for k in ("sequences", "tpot", "closed_ttft", "rate", "stay")
    )
    held = np.where(
        over, np.maximum(users - _at(v["closed"], where, fraction), 0.0), 0.0
    )  # beyond the slots: in the queue
    ttft = own + held / rate
    mean = request_s + ttft
    rate = users / (mean + stay)
    alone = v["closed_ttft"][:, 0][row]
    steady = np.ones(len(users), dtype=bool)
    e2e = mean + (workload.output_tokens - 1) * tpot
    used = np.minimum(rate / max_rate, 1.0)
    return ServingTime(mean, mean + np.maximum(ttft - alone, 0.0), tpot, e2e, rate * workload.output_tokens, n,
                       np.minimum(users, np.maximum(most, 1.0)), used, max_rate, steady)  # fmt: skip

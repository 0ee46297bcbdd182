"""What one replica does at each load, tabulated once: sequences decoding, rate, TPOT and TTFT of a (shard, engine, token budget).

Continuous batching with chunked prefill, in steady state. With N sequences decoding, p prompt tokens and K = o - 1 steps of an answer,
d(N) the decode step, c the prompt tokens a mixed step takes (at most max_num_batched_tokens - N), T(N, c) the mixed step:

    dP(N)     = (T(N, c) - d(N)) p / c             extra time one prompt costs the decoders
    rate(N)   = N / (K d(N) + N dP(N))             flow balance over a long stay: N = rate K TPOT
    N        <= K max_num_batched_tokens / (p + K) beyond it every step is full of prompt tokens
    TPOT      = d + (share of its steps that are mixed) (T - d), see queueing.tpot_*; more sequences decode than the flow says
                when answers are short against a prompt
    TTFT      = request overhead + rest of the running step + wait behind other prompts + own chunks + wait for a slot

Open loop: Poisson arrivals. Closed loop: U users, one request each, U = N + rate (request overhead + TTFT). Static batching (a batch runs to its end): cycle(B) = prefill(B p) + K d(B), rate = B / cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.engines.records import EngineSpec
from planner.estimator.time.engine_steps import LEAST_CHUNK, batch_prefill_s, decode_step_s, mixed_extra_s
from planner.estimator.time.engine_time import EngineTiming, engine_timing
from planner.estimator.time.queueing import QUANTILE, Load, Prefill, answer_step_s, closed_wait_s, prefill_wait_s
from planner.estimator.time.steps import StepTable
from planner.estimator.time.surfaces import FloatArray, IntArray
from planner.request import Workload

MOST = 4096.0  # sequences decoding, or users, at the end of the curves
# shares of the most sequences that can decode: geometric, then closer and closer to the end, where waits grow without bound
_SHARES = np.concatenate([np.geomspace(5e-6, 0.5, 24), [0.6, 0.7, 0.8, 0.87, 0.92, 0.955, 0.98, 0.992, 1.0]])
_SEQUENCES = np.concatenate([[0.02, 0.1, 0.25, 0.5], np.unique(np.round(np.exp2(np.arange(0, 12.1, 0.5))))])
_USERS = np.unique(np.round(np.exp2(np.arange(0, 12.1, 0.5))))
_BLOCK = 1024
OPEN = ("sequences", "rate", "tpot", "ttft", "p95", "stay")
CLOSED = (
    "sequences",
    "rate",
    "tpot",
    "ttft",
    "stay",
    "users",
)  # rate: what so many sequences leave, with or without users


@dataclass(frozen=True)
class ServingCurves:
    """U curves: one array (U, G) per quantity, which curve each row uses, request overhead (U,). Over users in a closed loop, else over sequences."""

    values: dict[str, FloatArray]
    row: IntArray
    request_s: FloatArray


@dataclass(frozen=True)
class _Keys:
    """Curves to make, all of shape (U, 1): indices, prompt tokens, steps of an answer, token budget of all attention groups, pipeline
    stages, attention groups."""

    table: StepTable
    timing: EngineTiming
    shard: IntArray
    engine: IntArray
    prompt: float
    answer: float
    budget: FloatArray
    stages: FloatArray
    groups: FloatArray

    @property
    def steps(self) -> float:
        """Decode steps of an answer after its first token; a one-token answer has none, and a thousandth stands for it."""
        return max(self.answer - 1.0, 1e-3)

    def most(self) -> FloatArray:
        """Sequences beyond which every step is full of prompt tokens, at most MOST."""
        return np.clip(self.steps * self.budget * self.stages / (self.prompt + self.steps), 1e-9, MOST)

    def decode_s(self, n: FloatArray) -> FloatArray:
        shard, engine = np.broadcast_to(self.shard, n.shape), np.broadcast_to(self.engine, n.shape)
        return decode_step_s(self.table, self.timing, shard, engine, n)

    def extra_s(self, n: FloatArray, chunk: FloatArray, step: FloatArray) -> FloatArray:
        at = np.broadcast_to(self.shard, n.shape), np.broadcast_to(self.engine, n.shape)
        return mixed_extra_s(self.table, self.timing, at, (n, chunk, self.prompt), step)

    def prefill(self, n: FloatArray, d: FloatArray) -> Prefill:
        """Prefill seen from n decoding sequences (any shape that starts with U)."""
        p = self.prompt
        room = np.maximum(self.budget - n / self.stages, LEAST_CHUNK)
        chunk = np.minimum(room, p * np.maximum(1.0, n / self.steps))  # prompts that wait together share a step
        single = np.minimum(room / self.groups, p)  # a prompt is one group's alone
        full = self.extra_s(n, room, d)
        own = (d + self.extra_s(n, single, d)) * (1 + (p / single - 1) / self.stages)
        return Prefill(step_s=d, cost_s=self.extra_s(n, chunk, d) * p / chunk / self.stages, own_s=own, full_step_s=d + full,
                       service_s=(d + full) * p / room / self.stages, share=p / room, steps=self.steps)  # fmt: skip


def _open(keys: _Keys) -> dict[str, FloatArray]:
    """Curves over sequences of continuous batching under Poisson arrivals, (U, G)."""
    flow = keys.most() * _SHARES
    d = keys.decode_s(flow)
    x = keys.prefill(flow, d)
    rate = np.maximum.accumulate(flow / (keys.steps * d + flow * x.cost_s), axis=1)
    mean_step = np.maximum.accumulate(d + flow * x.cost_s / keys.steps, axis=1)
    used = np.minimum(rate * x.service_s, 1.0)
    load = Load(rate, mean_step, 1 - np.exp(-flow - rate * x.own_s), used)
    mean, high = prefill_wait_s(x, load)
    tpot = answer_step_s(x, load)
    values = {"sequences": rate * keys.steps * tpot, "rate": rate, "tpot": tpot, "ttft": x.own_s + mean, "p95": x.own_s + high,
              "stay": keys.steps * tpot}  # fmt: skip
    return {name: np.maximum.accumulate(value, axis=1) for name, value in values.items()}


def _closed(keys: _Keys) -> dict[str, FloatArray]:
    """Curves of continuous batching in a closed loop, (U, G): users = N + rate (request overhead + TTFT)."""
    n = keys.most() * _SHARES
    d = keys.decode_s(n)
    x = keys.prefill(n, d)
    mixed = np.minimum(x.share * n / (keys.steps * keys.stages), 1.0)  # of the steps
    others = n / (n + 1.0)
    request = keys.timing.request_s[keys.engine]
    capacity = np.minimum(n / (keys.steps * d + n * x.cost_s), 1 / x.service_s)
    for _ in range(3):  # the others' share (U - 1) / U needs the number of users, which needs their rate
        tpot = d + others * n * x.cost_s / keys.steps
        rate = np.minimum(n / (keys.steps * tpot), 1 / x.service_s)
        load = Load(rate, tpot, 1 - np.exp(-n - rate * x.own_s), mixed)
        ttft = x.own_s + closed_wait_s(x, load, n, others)
        users = n + rate * (ttft + request)
        others = np.maximum(1 - 1 / users, 0.0)
    values = {"sequences": n, "rate": capacity, "tpot": tpot, "ttft": ttft, "stay": keys.steps * tpot, "users": users}
    return {name: np.maximum.accumulate(value, axis=1) for name, value in values.items()}


def _static(keys: _Keys, closed: bool) -> dict[str, FloatArray]:
    """Curves of static batching: a batch of B is prefilled whole and decoded to its end, (U, G). Below one request at a time
    (B < 1) it is the share of time the engine is busy."""
    n = np.broadcast_to(_USERS if closed else _SEQUENCES, (len(keys.shard), len(_USERS if closed else _SEQUENCES)))
    batch = np.maximum(n, 1.0)
    d = keys.decode_s(batch)
    shard, engine = np.broadcast_to(keys.shard, n.shape), np.broadcast_to(keys.engine, n.shape)
    first = batch_prefill_s(keys.table, keys.timing, shard, engine, (batch, keys.prompt))
    cycle = first + (keys.answer - 1) * d
    held = np.minimum(n, 1.0) * cycle
    values = {"sequences": n, "rate": n / cycle, "tpot": d, "ttft": first if closed else first + held / 2, "p95": first + QUANTILE * held,
              "stay": cycle - first, "users": n}  # fmt: skip
    return {name: np.maximum.accumulate(values[name], axis=1) for name in (CLOSED if closed else OPEN)}


def serving_curves(
    table: StepTable,
    engines: Sequence[EngineSpec],
    rows: tuple[IntArray, IntArray, IntArray],
    load: tuple[Workload, bool],
) -> ServingCurves:
    """Curves of rows (shard, engine, max_num_batched_tokens of an attention group), made once: any load of these rows is read from them.

    load = (lengths, whether a fixed number of users sends the requests).
    """
    workload, closed = load
    shard, engine, batched = rows
    timing = engine_timing(engines)
    budgets, which = np.unique(batched, return_inverse=True)
    code = (shard * len(engines) + engine) * len(budgets) + which
    unique, row = np.unique(code, return_inverse=True)
    of_shard, of_engine = unique // (len(engines) * len(budgets)), unique // len(budgets) % len(engines)
    budget = np.maximum(budgets[unique % len(budgets)].astype(float), LEAST_CHUNK)
    static = timing.static[of_engine] > 0
    parts: list[tuple[IntArray, dict[str, FloatArray]]] = []
    for chosen, batches in ((np.flatnonzero(~static), False), (np.flatnonzero(static), True)):
        for start in range(0, len(chosen), _BLOCK):  # blocks that stay in the processor's cache
            block = chosen[start : start + _BLOCK]
            at = (of_shard[block, None], of_engine[block, None], budget[block, None])
            groups = table.groups[at[0]]
            keys = _Keys(table, timing, at[0], at[1], float(workload.input_tokens), float(workload.output_tokens), at[2] * groups,
                         table.pipeline[at[0]], groups)  # fmt: skip
            made = _static(keys, closed) if batches else _closed(keys) if closed else _open(keys)
            parts.append((block, made))
    return ServingCurves(_together(parts, len(unique)), row.astype(np.int64), timing.request_s[of_engine])


def _together(parts: list[tuple[IntArray, dict[str, FloatArray]]], count: int) -> dict[str, FloatArray]:
    """One array per quantity from blocks of curves; a shorter grid is filled up with its last point."""
    width = max((next(iter(made.values())).shape[1] for _, made in parts), default=2)
    values: dict[str, FloatArray] = {}
    for block, made in parts:
        for name, value in made.items():
            into = values.setdefault(name, np.empty((count, width)))
            into[block, : value.shape[1]] = value
            into[block, value.shape[1] :] = value[:, -1:]
    return values

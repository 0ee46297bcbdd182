"""Replays measured serving rows: the prediction for each row of a file with the columns of serving_measured.csv.

Every row gets a number or the reason it has none. Rows are grouped by model and lengths, one step table a group, and timed by
the same functions as a solve.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.engines.records import EngineSpec
from planner.errors import PlannerError
from planner.estimator.time.engine_steps import batch_prefill_s, decode_step_s, mixed_extra_s
from planner.estimator.time.engine_time import EXPERT_FAMILIES, EngineTiming, engine_timing
from planner.estimator.time.ggml import token_s
from planner.estimator.time.ggml_split import prompt_s
from planner.estimator.time.queueing import wave_wait_s
from planner.estimator.time.serving import LoadRows, ServingTime, serving_time
from planner.estimator.time.steps import StepTable, step_table
from planner.estimator.time.surfaces import FloatArray, IntArray, surface_of
from planner.estimator.uncertainty import ranges
from planner.hardware.records import Catalog
from planner.request import Workload
from planner.validate.finite_run import Arrivals, FiniteRun, finite_run
from planner.validate.prediction import Prediction
from planner.validate.serving_rows import METRICS, Case, SkipError, read_case, slots, tables

OWN_KERNELS = "llama_cpp"
COLUMNS = ("model", "gpu", "n_gpus", "tp", "pp", "precision_w", "kv_dtype", "engine", "engine_version", "batch_or_concurrency", "isl", "osl",
           "metric", "value", "load_kind", "note", "source")  # fmt: skip


def replay(rows: list[dict[str, str]], catalog: Catalog | None = None) -> list[Prediction]:
    """One Prediction per row, in order. Units as the row's metric: ms, tokens/s or requests/s. A column a row lacks reads as empty."""
    if catalog is None:
        from planner.hardware.catalog import load_catalog

        catalog = load_catalog()
    found: list[Prediction] = [Prediction(None, None, None, "not read")] * len(rows)
    groups: dict[tuple[Any, ...], list[Case]] = defaultdict(list)
    for i, row in enumerate(rows):
        try:
            case = read_case(i, {name: row.get(name) or "" for name in COLUMNS}, catalog)
            own = case.row if own_kernels(case) else None  # a law of its own, case by case
            groups[case.model, case.input_tokens, case.output_tokens, own].append(case)
        except (SkipError, PlannerError) as reason:
            found[i] = Prediction(None, None, None, str(reason))
    for cases in groups.values():
        try:
            values = [_bench(cases[0])] if own_kernels(cases[0]) else _predict(cases)
        except (SkipError, PlannerError) as reason:
            for case in cases:
                found[case.row] = Prediction(None, None, None, str(reason))
            continue
        for case, value in zip(cases, values, strict=True):
            if not np.isfinite(value) or value <= 0:
                found[case.row] = Prediction(None, None, None, f"no reading for load kind {case.kind!r}")
                continue
            low, high = ranges(METRICS[case.metric], kernel_class(case), case.engine.name)
            found[case.row] = Prediction(value, value * low, value * high)
    return found


def own_kernels(case: Case) -> bool:
    """True where the engine's kernels are its own: no surface stands for them."""
    return case.engine.name == OWN_KERNELS


def kernel_class(case: Case) -> str:
    """Class of the ranges: whose kernel measurements stand behind a prediction (`uncertainty.ranges`)."""
    if own_kernels(case):
        return "own"
    return "borrowed" if surface_of(case.shard.gpu).borrowed else "measured"


def _bench(case: Case) -> float:
    """llama.cpp: one sequence, a prompt or single tokens at the mean context. SkipError for a load that is not modelled."""
    if case.kind not in ("llama-bench", "bs1_decode") or (case.load or 1.0) > 1:
        raise SkipError(f"llama.cpp is modelled for one sequence, not for {case.kind} with {case.load or 'no'} at once")
    if METRICS[case.metric] in ("prefill", "ttft"):
        first = prompt_s(case.model, case.shard, case.input_tokens, case.budget)
        return case.input_tokens / first if METRICS[case.metric] == "prefill" else 1e3 * first
    step = token_s(case.model, case.shard, case.input_tokens + case.output_tokens / 2)
    per_gpu = case.shard.gpus if case.metric == "output_tok_s_per_gpu" else 1
    return 1e3 * step if case.metric.endswith("_ms") else 1 / step / per_gpu


@dataclass(frozen=True)
class _Batch:
    """Cases of one model and lengths with their table and indices."""

    cases: Sequence[Case]
    table: StepTable
    timing: EngineTiming
    engines: tuple[EngineSpec, ...]
    shard: IntArray
    engine: IntArray
    workload: Workload


def _predict(cases: list[Case]) -> list[float]:
    """Predictions of cases that share model and lengths, in the unit of each metric."""
    shards = list(dict.fromkeys(c.shard for c in cases))
    engines = tuple(dict.fromkeys(c.engine for c in cases))
    workload = Workload(input_tokens=cases[0].input_tokens, output_tokens=cases[0].output_tokens)
    batch = _Batch(cases, step_table(cases[0].model, shards, workload, EXPERT_FAMILIES), engine_timing(engines), engines,
                   np.array([shards.index(c.shard) for c in cases]), np.array([engines.index(c.engine) for c in cases]), workload)  # fmt: skip
    values = np.full(len(cases), np.nan)
    for kinds, run in ((("static_batch", "bs1_decode"), _static), (("closed_loop", "static_concurrency"), _closed),
                       (("offline_saturated", "mlperf_offline"), _saturated), (("online_qps", "mlperf_server"), _online)):  # fmt: skip
        index = np.array([i for i, c in enumerate(cases) if c.kind in kinds], dtype=np.int64)
        if len(index):
            values[index] = run(batch, index)
    return [float(v) for v in values]


def _pick(batch: _Batch, index: IntArray, values: dict[str, FloatArray]) -> FloatArray:
    """The metric of each case from seconds (ttft, tpot) and tokens/s of a replica."""
    out = np.empty(len(index))
    for j, i in enumerate(index):
        case = batch.cases[i]
        name = METRICS[case.metric]
        value = values[name][j]
        if case.metric.endswith("_ms"):
            value *= 1e3
        elif case.metric == "output_tok_s_per_gpu":
            value /= case.shard.gpus
        elif case.metric == "req_s":
            value /= case.output_tokens
        out[j] = value * case.replicas if name == "throughput" else value
    return out


def _static(batch: _Batch, index: IntArray) -> FloatArray:
    """A batch that starts together and runs to its end; batch 1 for single-stream rows."""
    shard, engine = batch.shard[index], batch.engine[index]
    size = np.array([batch.cases[i].load or 1.0 for i in index])
    tokens, steps = float(batch.workload.input_tokens), batch.workload.output_tokens - 1
    first = batch_prefill_s(batch.table, batch.timing, shard, engine, (size, tokens)) + batch.timing.request_s[engine]
    step = decode_step_s(batch.table, batch.timing, shard, engine, size)
    total = first + steps * step
    single = np.array([batch.cases[i].kind != "static_batch" for i in index])
    rate = np.where(single, 1 / step, size * batch.workload.output_tokens / total)
    return _pick(batch, index, {"ttft": first, "tpot": step, "throughput": rate, "prefill": size * tokens / first})


def _rows(batch: _Batch, index: IntArray, caps: FloatArray | None, **load: FloatArray) -> ServingTime:
    budget = np.array([batch.cases[i].budget for i in index])
    rows = LoadRows(
        batch.shard[index],
        batch.engine[index],
        load.get("rate"),
        load.get("users"),
        budget,
        None if caps is None else np.maximum(caps, 1).astype(np.int64),
    )
    return serving_time(batch.table, batch.engines, rows, batch.workload)


def _closed(batch: _Batch, index: IntArray) -> FloatArray:
    """N users; the first round arrives at once. Equal lengths keep the users in step: every round comes in waves."""
    users = np.array([batch.cases[i].load or 1.0 for i in index])
    equal = np.array([batch.cases[i].equal_lengths for i in index])
    first_round = (
        np.array([float(batch.cases[i].kind == "closed_loop") for i in index]) / tables()["closed_loop_rounds"]["value"]
    )
    steady = _rows(batch, index, np.array([slots(batch.cases[i]) for i in index]), users=users)
    wave, burst = _waves_s(batch, index, users)
    at_once = np.array([batch.cases[i].kind == "static_concurrency" for i in index])
    later = np.where(equal, steady.ttft_mean_s + wave, steady.ttft_mean_s) + _held_back_s(batch, index, users)
    ttft = np.where(at_once, burst, (1 - first_round) * later + first_round * np.maximum(burst, later))
    tpot, tokens = steady.tpot_s, steady.output_tokens_per_s
    in_step = np.array([batch.cases[i].in_step for i in index])
    rounds = in_step & (batch.timing.prefill_first[batch.engine[index]] > 0)
    if rounds.any():
        first, step, rate = _rounds(batch, index, users)
        ttft, tpot, tokens = (np.where(rounds, a, b) for a, b in ((first, ttft), (step, tpot), (rate, tokens)))
    return _pick(batch, index, {"ttft": ttft, "tpot": tpot, "throughput": tokens})


def _rounds(batch: _Batch, index: IntArray, users: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Mean time to first token, TPOT and tokens/s of N users with equal lengths on an engine that prefills before it decodes.

    Whoever waits is prefilled before the next decode step, so all N decode together, end together and come again together: a round is
    T + K d(N), T the prefill of N prompts in g steps of as many prompts as fit. First tokens come after T (1 + 1/g) / 2 on average, and
    TPOT = d + T (1 - 1/g) / (2 K). Users beyond the slots wait for a round in turn.
    """
    shard, engine = batch.shard[index], batch.engine[index]
    tokens, steps = float(batch.workload.input_tokens), max(batch.workload.output_tokens - 1.0, 1.0)
    budget = np.array([float(batch.cases[i].budget) for i in index])
    running = np.minimum(users, np.array([slots(batch.cases[i]) for i in index]))
    together = np.minimum(running, np.maximum(np.floor(budget / tokens), 1.0))
    chunks = np.ceil(tokens / budget)
    job = chunks * batch_prefill_s(batch.table, batch.timing, shard, engine, (together / chunks, tokens))
    groups = np.ceil(running / together)
    prefill, step = groups * job, decode_step_s(batch.table, batch.timing, shard, engine, running)
    stay = prefill + steps * step
    first = batch.timing.request_s[engine] + prefill * (1 + 1 / groups) / 2 + (users / running - 1) * stay
    rate = running * batch.workload.output_tokens / (stay + batch.timing.request_s[engine])
    return first, step + prefill * (1 - 1 / groups) / 2 / steps, rate


def _held_back_s(batch: _Batch, index: IntArray, users: FloatArray) -> FloatArray:
    """Mean time a prompt is held back where the run lets prompts wait for others.

    Prompts come a = users / K per step; the first waits T steps, or until the (share budget / p)-th is there; those that come in between
    wait for the rest of it, half of T on average, and all 1 + a T share the step that prefills them.
    """
    steps = np.array([batch.cases[i].pause.steps for i in index])
    if not steps.any():
        return np.zeros(len(index))
    shard, engine = batch.shard[index], batch.engine[index]
    tokens, answer = float(batch.workload.input_tokens), max(batch.workload.output_tokens - 1.0, 1.0)
    budget = np.array([float(batch.cases[i].budget) for i in index]) * batch.table.groups[shard]
    share = np.array([batch.cases[i].pause.share for i in index])
    rate = users / answer
    steps = np.where(share > 0, np.minimum(steps, np.maximum(share * budget / tokens - 1, 0.0) / rate), steps)
    together = 1 + rate * steps
    step = decode_step_s(batch.table, batch.timing, shard, engine, users)

    def extra(prompts: FloatArray) -> FloatArray:
        load = users, np.minimum(prompts * tokens, budget), tokens
        return mixed_extra_s(batch.table, batch.timing, (shard, engine), load, step)

    wait = (steps + rate * steps**2 / 2) / together * step + extra(together) - extra(np.ones(len(index)))
    return np.where(steps > 0, wait, 0.0)


def _waves_s(batch: _Batch, index: IntArray, users: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean wait of a round in waves, and mean time to first token of a burst of all users at once."""
    shard, engine = batch.shard[index], batch.engine[index]
    tokens = float(batch.workload.input_tokens)
    budget = np.array([float(batch.cases[i].budget) for i in index])
    budget = budget * batch.table.groups[shard]
    together = np.minimum(users, np.maximum(np.floor(budget / tokens), 1.0))
    step = decode_step_s(batch.table, batch.timing, shard, engine, users)
    load = users, np.minimum(together * tokens, budget), tokens
    mixed = step + mixed_extra_s(batch.table, batch.timing, (shard, engine), load, step)
    job = mixed * np.ceil(tokens / budget)
    groups, request = users / together, batch.timing.request_s[engine]
    wave = wave_wait_s(tables()["turnaround_s"]["value"], step, mixed, (groups - 1) / 2 * job)
    return wave, request + job * (groups + 1) / 2


def _saturated(batch: _Batch, index: IntArray) -> FloatArray:
    """Everything queued at once: as many running as memory holds."""
    caps = np.array([batch.cases[i].load or slots(batch.cases[i]) for i in index])
    full = _rows(batch, index, caps, users=caps)
    return _pick(
        batch,
        index,
        {
            "throughput": full.max_rate_per_s * batch.workload.output_tokens,
            "ttft": full.ttft_mean_s,
            "tpot": full.tpot_s,
        },
    )


def _online(batch: _Batch, index: IntArray) -> FloatArray:
    """Poisson arrivals; 'INF' sends every request at once; MLPerf servers run at the highest rate they can."""
    caps = np.array([slots(batch.cases[i]) for i in index])
    capacity = _rows(batch, index, caps, users=caps)
    rate = np.array([batch.cases[i].load or np.inf for i in index])
    server = np.array([batch.cases[i].kind == "mlperf_server" for i in index])
    edge = float(tables()["server_utilisation"]["value"])
    at = _rows(
        batch,
        index,
        caps,
        rate=np.where(server, edge, np.minimum(rate / capacity.max_rate_per_s, 0.98)) * capacity.max_rate_per_s,
    )
    over = ~server & (rate > tables()["steady_below"]["value"] * capacity.max_rate_per_s)
    p99 = at.ttft_mean_s + (at.ttft_p95_s - at.ttft_mean_s) * np.log(100) / np.log(20)  # exponential tail
    count = float(tables()["online_requests"]["value"])
    equal = np.array([batch.cases[i].equal_lengths for i in index])
    longest = np.where(
        equal, 1.0, np.log(np.maximum(at.running, 1.0)) + np.euler_gamma
    )  # of those that run, over their mean
    span = (
        count / at.output_tokens_per_s * batch.workload.output_tokens + at.e2e_s * longest
    )  # the last answers run out after the last arrival
    ttft, tpot = at.ttft_mean_s, at.tpot_s
    tokens = np.where(server, at.output_tokens_per_s, count * batch.workload.output_tokens / span)
    if over.any():
        ends = _followed(batch, index[over], Arrivals(rate[over], count, float(batch.workload.input_tokens),
                         float(batch.workload.output_tokens), caps[over], np.array([float(batch.cases[i].budget) for i in index[over]]), equal[over]))  # fmt: skip
        ttft[over], tpot[over], tokens[over] = ends.ttft_s, ends.tpot_s, ends.tokens_per_s
    return _pick(
        batch, index, {"ttft": ttft, "ttft_p99": p99, "tpot": tpot, "tpot_p99": at.tpot_s, "throughput": tokens}
    )


def _followed(batch: _Batch, index: IntArray, arrivals: Arrivals) -> FiniteRun:
    """Runs that have no steady state."""
    shard, engine = batch.shard[index], batch.engine[index]

    def decode(sequences: FloatArray) -> FloatArray:
        return decode_step_s(batch.table, batch.timing, shard, engine, sequences)

    def extra(sequences: FloatArray, chunk: FloatArray, step: FloatArray) -> FloatArray:
        return mixed_extra_s(batch.table, batch.timing, (shard, engine), (sequences, chunk, arrivals.prompt), step)

    found = finite_run(decode, extra, arrivals)
    return replace(found, ttft_s=found.ttft_s + batch.timing.request_s[engine])

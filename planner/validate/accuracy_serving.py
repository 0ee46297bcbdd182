"""Replays measured serving rows: the prediction for each row of a file with the columns of serving_measured.csv.

Every row gets a number or the reason it has none. Rows are grouped by model and lengths, one step table a group, and timed by
the same functions as a solve.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.engines.records import EngineSpec
from planner.errors import PlannerError
from planner.estimator.time.engine_steps import batch_prefill_s, decode_step_s, mixed_extra_s
from planner.estimator.time.engine_time import EngineTiming, engine_timing
from planner.estimator.time.ggml import token_s
from planner.estimator.time.ggml_split import prompt_s
from planner.estimator.time.queueing import wave_wait_s
from planner.estimator.time.serving import LoadRows, ServingTime, serving_time
from planner.estimator.time.steps import StepTable, step_table
from planner.estimator.time.surfaces import FloatArray, IntArray, surface_of
from planner.estimator.uncertainty import ranges
from planner.hardware.records import Catalog
from planner.request import Workload
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
    batch = _Batch(cases, step_table(cases[0].model, shards, workload), engine_timing(engines), engines,
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
    later = np.where(equal, steady.ttft_mean_s + wave, steady.ttft_mean_s)
    ttft = np.where(at_once, burst, (1 - first_round) * later + first_round * np.maximum(burst, later))
    return _pick(batch, index, {"ttft": ttft, "tpot": steady.tpot_s, "throughput": steady.output_tokens_per_s})


def _waves_s(batch: _Batch, index: IntArray, users: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean wait of a round in waves, and mean time to first token of a burst of all users at once."""
    shard, engine = batch.shard[index], batch.engine[index]
    tokens = float(batch.workload.input_tokens)
    budget = np.array([float(batch.cases[i].budget) for i in index])
    together = np.minimum(users, np.maximum(np.floor(budget / tokens), 1.0))
    step = decode_step_s(batch.table, batch.timing, shard, engine, users)
    load = users, np.minimum(together * tokens, budget)
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
    p99 = at.ttft_mean_s + (at.ttft_p95_s - at.ttft_mean_s) * np.log(100) / np.log(20)  # exponential tail
    count = float(tables()["online_requests"]["value"])
    everyone = np.full(len(index), count)
    flood = _rows(batch, index, caps, users=everyone)
    _, burst = _waves_s(batch, index, everyone)
    at_once = ~np.isfinite(rate) & ~server
    span = (
        count / at.output_tokens_per_s * batch.workload.output_tokens + at.e2e_s
    )  # the last answers run out after the last arrival
    tokens = np.where(server, at.output_tokens_per_s, count * batch.workload.output_tokens / span)
    return _pick(batch, index, {
        "ttft": np.where(at_once, burst, at.ttft_mean_s), "ttft_p99": p99, "tpot": np.where(at_once, flood.tpot_s, at.tpot_s),
        "tpot_p99": at.tpot_s, "throughput": tokens})  # fmt: skip

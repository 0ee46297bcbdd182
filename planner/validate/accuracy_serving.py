"""Replays measured serving rows: the prediction for each row of a file with the columns of serving_measured.csv.

A row's strings are read by the tables of serving_rows.yaml, nothing else; every row gets a number or the reason it has none.
Rows are grouped by model and lengths, one step table a group, and timed by the same functions as a solve.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from planner.engines.records import EngineSpec
from planner.errors import PlannerError
from planner.estimate.memory.kv_cache import kv_bytes_per_token
from planner.estimate.memory.weights import weights_bytes
from planner.estimate.time.engine_time import EngineTiming, engine_timing
from planner.estimate.time.kernels import peak_flops
from planner.estimate.time.queueing import wave_wait_s
from planner.estimate.time.serving import (
    LoadRows,
    ServingTime,
    batch_prefill_s,
    decode_step_s,
    mixed_extra_s,
    serving_time,
)
from planner.estimate.time.steps import StepTable, step_table
from planner.estimate.time.surfaces import FloatArray, IntArray, read_data, surface_of
from planner.estimate.uncertainty import ranges
from planner.hardware.records import Catalog, Gpu, Link
from planner.models import load_model
from planner.models.precision import Precision, kv_dtype, precision
from planner.models.spec import ModelSpec
from planner.request import Workload
from planner.space.shard import Shard
from planner.units import GIB
from planner.validate.prediction import Prediction

METRICS = {"ttft_ms": "ttft", "ttft_p99_ms": "ttft_p99", "tpot_ms": "tpot", "tpot_p50_ms": "tpot", "tpot_p99_ms": "tpot_p99", "itl_ms": "tpot",
           "output_tok_s_total": "throughput", "output_tok_s_per_gpu": "throughput", "prefill_tok_s": "prefill", "req_s": "throughput"}  # fmt: skip


class _SkipError(Exception):
    """A row that cannot be predicted, with the reason."""


@dataclass(frozen=True)
class Case:
    """A row, read: what was run and how it was loaded. load: users, requests/s or batch, by kind; None = saturated."""

    row: int
    model: ModelSpec
    shard: Shard
    engine: EngineSpec
    budget: int
    input_tokens: int
    output_tokens: int
    kind: str
    load: float | None
    metric: str
    replicas: int = 1
    equal_lengths: bool = False


@cache
def _tables() -> dict[str, Any]:
    tables: dict[str, Any] = read_data("planner.validate", "serving_rows.yaml")
    return tables


def _match(table: str, *texts: str) -> list[Any]:
    for entry in _tables()[table]:
        found = [re.fullmatch(pattern, text.strip().lower()) for pattern, text in zip(entry, texts, strict=False)]
        if all(found):
            return [
                found[0].expand(v) if isinstance(v, str) and "\\" in v else v for v in entry[len(texts) :] if found[0]
            ]
    raise _SkipError(f"{table[:-1]} {' '.join(texts)!r} is in no table")


def _number(text: str, default: float | None = None) -> float:
    match = re.search(r"\d+(?:\.\d+)?", text or "")
    if match:
        return float(match[0])
    if default is None:
        raise _SkipError(f"{text!r} is not a number")
    return default


def _precision(text: str, model: ModelSpec, gpu: Gpu) -> Precision:
    name = _match("precisions", text)[0]
    stored = [v for k, v in _tables()["checkpoints"].items() if k in model.name.lower()]
    native = precision(stored[0] if stored else model.native_precision)
    if name == "native" or native.bits < 16:
        return native
    found = precision(name)
    if text.lower().startswith("exl2-"):
        found = replace(found, bits=_number(text.split("-")[1]), overhead_bits=0.0)
    if text.lower().startswith("fp8/fp4") and "fp4" in gpu.peak_tflops and "fp8" in gpu.peak_tflops:
        return precision("nvfp4")
    return found


def _parallel(row: dict[str, str]) -> tuple[int, int, int, int]:
    """tensor_parallel, pipeline_parallel, expert_parallel, attention_data_parallel of a row; unsaid = the fewest that hold it."""
    note = {k: int(v) for k, v in re.findall(r"(attn_dp|moe_tp|moe_ep)=(\d+)", row["note"])}
    pipeline = int(_number(row["pp"], 1))
    tensor = int(_number(row["tp"], 0)) or int(_number(row["n_gpus"], 1)) // pipeline
    experts = note.get("moe_ep", 1) or 1
    group = max(tensor * max(1, note.get("attn_dp", 1)), note.get("moe_tp", 1) * experts, 1)
    return group, pipeline, experts, max(1, group // max(tensor, 1))


def _links(gpu: Gpu, catalog: Catalog) -> Link | None:
    return catalog.links.get(getattr(gpu, "default_link", "") or "")


def read_case(index: int, row: dict[str, str], catalog: Catalog) -> Case:
    """What a row says, or _SkipError with the reason."""
    if row["metric"] not in METRICS:
        raise _SkipError(f"{row['metric']} is not a time or a rate (memory rows are replayed elsewhere)")
    if "SUSPECT" in row["note"]:
        raise _SkipError("flagged SUSPECT in the source")
    name, reason = _match("gpus", row["gpu"])
    if name is None:
        raise _SkipError(reason)
    if name not in catalog.gpus:
        raise _SkipError(f"{name} is not in the hardware catalog")
    gpu = catalog.gpus[name]
    engine_name, generation, batching, budget = _match("engines", row["engine"], row["engine_version"])
    model = load_model(_tables()["models"].get(row["model"].lower(), row["model"]), offline=True)
    weights = _precision(row["precision_w"], model, gpu)
    peak_flops(gpu, weights.compute_dtype)
    unsaid_8bit = not row["kv_dtype"] and weights.bits <= 8 and not weights.weight_only and "fp8" in gpu.peak_tflops
    kv = kv_dtype("fp8" if row["kv_dtype"] == "fp8" or unsaid_8bit else "bf16")
    tensor, pipeline, experts, attention = _parallel(row)
    replicas = 1
    if row["load_kind"].startswith("mlperf"):
        tensor, replicas = _smallest_group(model, gpu, weights, tensor)
    link = _links(gpu, catalog)
    shard = Shard(
        gpu,
        weights,
        kv,
        tensor,
        pipeline,
        link if tensor > 1 else None,
        link if pipeline > 1 else None,
        experts,
        attention,
    )
    engine = EngineSpec(
        engine_name, generation, (gpu.vendor,), 0.0, batching, True, True, True, True, "any", "", (), {}, "", False
    )
    tokens, output = _lengths(row)
    load = _load(row, tensor * pipeline, replicas)
    _, equal, one_prompt = (
        _match("closed_loops", row["source"]) if row["load_kind"] == "closed_loop" else (1.0, False, False)
    )
    budget = min(budget, tokens + int(load or 0)) if one_prompt else budget
    return Case(
        index, model, shard, engine, budget, tokens, output, row["load_kind"], load, row["metric"], replicas, equal
    )


def _smallest_group(model: ModelSpec, gpu: Gpu, weights: Precision, gpus: int) -> tuple[int, int]:
    """MLPerf rows state machines, not the cut: the fewest GPUs that hold weights twice over, the rest are replicas."""
    need = model.params_total * weights.bytes_per_weight * 1.6 / (gpu.usable_gib * GIB)
    tensor = 1
    while tensor < need and tensor < gpus:
        tensor *= 2
    return tensor, max(1, gpus // tensor)


def _lengths(row: dict[str, str]) -> tuple[int, int]:
    text = row["isl"]
    tokens = (
        float(_tables()["datasets"][row["model"].lower()]["tokens"]) if text == "MLPerf dataset" else _number(text, 128)
    )
    output = _number(row["osl"], 128)
    if row["load_kind"] == "closed_loop":
        share = _match("closed_loops", row["source"])[0]
        tokens, output = tokens * share, output * share
    return max(1, round(tokens)), max(1, round(output))


def _load(row: dict[str, str], gpus: int, replicas: int) -> float | None:
    text, kind = row["batch_or_concurrency"], row["load_kind"]
    if kind in ("offline_saturated", "mlperf_offline") or text in ("max", "qps=INF"):
        return _number(text) if "max_num_seqs" in text else None
    if kind == "mlperf_server":
        return float(row["_server_tok_s"]) / _number(row["osl"]) / replicas if row.get("_server_tok_s") else None
    return _number(text, 1)


def slots(case: Case) -> float:
    """Sequences whose KV cache fits beside the weights, on the whole replica; an engine sets aside all or half of an answer."""
    table, shard = _tables()["saturated"], case.shard
    cut = (shard.tensor_parallel, shard.pipeline_parallel)
    weights = weights_bytes(case.model, shard.precision, *cut, shard.expert_parallel, shard.attention_data_parallel)
    usable, runtime = shard.gpu.usable_gib * GIB, table["runtime_gib"]["value"] * GIB
    rule = table["memory_share"].get(case.engine.name, table["memory_share"]["otherwise"])
    share = rule["share"]
    free = (usable - weights - runtime) * share if rule["of"] == "free" else usable * share - weights - runtime
    per_token = kv_bytes_per_token(case.model, shard.kv_dtype, *cut, shard.attention_data_parallel)
    reserve = table["reserved_output"].get(case.engine.name, table["reserved_output"]["otherwise"])
    held = (
        free / max(per_token, 1e-9) / (case.input_tokens + case.output_tokens * reserve) * shard.attention_data_parallel
    )
    return float(np.clip(held, 1.0, table["max_num_seqs"]["value"]))


def replay(rows: list[dict[str, str]], catalog: Catalog | None = None) -> list[Prediction]:
    """One Prediction per row, in order. Units as the row's metric: ms, tokens/s or requests/s."""
    if catalog is None:
        from planner.hardware.catalog import load_catalog

        catalog = load_catalog()
    server = {
        r["source"]: r["value"]
        for r in rows
        if r["load_kind"] == "mlperf_server" and r["metric"] == "output_tok_s_total"
    }
    found: list[Prediction] = [Prediction(None, None, None, "not read")] * len(rows)
    groups: dict[tuple[Any, ...], list[Case]] = defaultdict(list)
    for i, row in enumerate(rows):
        try:
            case = read_case(i, {**row, "_server_tok_s": server.get(row["source"], "")}, catalog)
            groups[case.model, case.input_tokens, case.output_tokens].append(case)
        except (_SkipError, PlannerError) as reason:
            found[i] = Prediction(None, None, None, str(reason))
    for cases in groups.values():
        for case, value in zip(cases, _predict(cases), strict=True):
            if not np.isfinite(value):
                found[case.row] = Prediction(None, None, None, "the model finds the stated load beyond the capacity")
                continue
            klass = "borrowed" if surface_of(case.shard.gpu).borrowed else "measured"
            low, high = ranges(METRICS[case.metric], klass, case.engine.name)
            found[case.row] = Prediction(value, value * low, value * high)
    return found


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
    for kinds, run in ((("static_batch", "bs1_decode", "llama-bench"), _static), (("closed_loop", "static_concurrency"), _closed),
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
    chunk = np.array(
        [float(batch.cases[i].budget) for i in index]
    )  # llama.cpp: chunk by chunk, one stage after the other
    count = np.ceil(size * tokens / chunk)
    chunked = (
        batch_prefill_s(batch.table, batch.timing, shard, engine, (size, np.minimum(chunk / size, tokens))) * count
    )
    first = np.where(np.array([batch.cases[i].kind == "llama-bench" for i in index]), chunked, first)
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
    return serving_time(batch.cases[0].model, batch.table, batch.engines, rows, batch.workload)


def _closed(batch: _Batch, index: IntArray) -> FloatArray:
    """N users; the first round arrives at once. Equal lengths keep the users in step: every round comes in waves."""
    users = np.array([batch.cases[i].load or 1.0 for i in index])
    equal = np.array([batch.cases[i].equal_lengths for i in index])
    first_round = (
        np.array([float(batch.cases[i].kind == "closed_loop") for i in index])
        / _tables()["closed_loop_rounds"]["value"]
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
    mixed = step + mixed_extra_s(
        batch.table, batch.timing, shard, engine, (users, np.minimum(together * tokens, budget))
    )
    job = mixed * np.ceil(tokens / budget)
    groups, request = users / together, batch.timing.request_s[engine]
    wave = wave_wait_s(_tables()["turnaround_s"]["value"], step, mixed, (groups - 1) / 2 * job)
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
    at = _rows(batch, index, caps, rate=np.minimum(rate, capacity.max_rate_per_s * 0.98))
    count = float(_tables()["online_requests"]["value"])
    everyone = np.full(len(index), count)
    flood = _rows(batch, index, caps, users=everyone)
    _, burst = _waves_s(batch, index, everyone)
    server = np.array([batch.cases[i].kind == "mlperf_server" for i in index])
    at_once = ~np.isfinite(rate) & ~server
    span = (
        count / at.output_tokens_per_s * batch.workload.output_tokens + at.e2e_s
    )  # the last answers run out after the last arrival
    tokens = np.where(
        server, capacity.max_rate_per_s * batch.workload.output_tokens, count * batch.workload.output_tokens / span
    )
    return _pick(batch, index, {
        "ttft": np.where(at_once, burst, at.ttft_mean_s), "ttft_p99": at.ttft_p95_s, "tpot": np.where(at_once, flood.tpot_s, at.tpot_s),
        "tpot_p99": at.tpot_s, "throughput": tokens})  # fmt: skip

"""Reads a measured serving row: what ran, on what, how it was cut and loaded. Tables: serving_rows.yaml, nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from planner.engines.records import EngineSpec
from planner.estimator.memory.kv_cache import kv_bytes_per_token
from planner.estimator.memory.weights import weights_bytes
from planner.estimator.time.engine_time import EXPERTS_OF
from planner.estimator.time.kernels import peak_flops
from planner.estimator.time.surfaces import read_data
from planner.hardware.records import Catalog, Gpu, Link
from planner.models import load_model
from planner.models.precision import Precision, kv_dtype, precision
from planner.models.spec import ModelSpec
from planner.space.shard import Shard
from planner.units import GIB

METRICS = {"ttft_ms": "ttft", "ttft_p99_ms": "ttft_p99", "tpot_ms": "tpot", "tpot_p50_ms": "tpot", "tpot_p99_ms": "tpot_p99", "itl_ms": "tpot",
           "output_tok_s_total": "throughput", "output_tok_s_per_gpu": "throughput", "prefill_tok_s": "prefill", "req_s": "throughput"}  # fmt: skip


class SkipError(Exception):
    """A row that cannot be predicted, with the reason."""


@dataclass(frozen=True)
class Pause:
    """A prompt waits up to `steps` decode steps for others, or until prompts fill a `share` of a step's tokens (0 = however full)."""

    steps: float = 0.0
    share: float = 0.0


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
    in_step: bool = False
    pause: Pause = Pause()


@cache
def tables() -> dict[str, Any]:
    """The tables of serving_rows.yaml."""
    found: dict[str, Any] = read_data("planner.validate", "serving_rows.yaml")
    return found


def _match(table: str, *texts: str) -> list[Any]:
    for entry in tables()[table]:
        found = [re.fullmatch(pattern, text.strip().lower()) for pattern, text in zip(entry, texts, strict=False)]
        if all(found):
            return [
                found[0].expand(v) if isinstance(v, str) and "\\" in v else v for v in entry[len(texts) :] if found[0]
            ]
    raise SkipError(f"{table[:-1]} {' '.join(texts)!r} is in no table")


def _number(text: str, default: float | None = None) -> float:
    match = re.search(r"\d+(?:\.\d+)?", text or "")
    if match:
        return float(match[0])
    if default is None:
        raise SkipError(f"{text!r} is not a number")
    return default


def _precision(text: str, model: ModelSpec, gpu: Gpu) -> Precision:
    name = _match("precisions", text)[0]
    stored = [v for k, v in tables()["checkpoints"].items() if k in model.name.lower()]
    native = precision(stored[0] if stored else model.native_precision)
    if name == "native" or native.bits < 16:
        return native
    found = precision(name)
    if text.lower().startswith("exl2-"):
        found = replace(found, bits=_number(text.split("-")[1]), overhead_bits=0.0)
    if text.lower().startswith("fp8/fp4") and "fp4" in gpu.peak_tflops and "fp8" in gpu.peak_tflops:
        return precision("nvfp4")
    return found


def _unsaid_kv(engine: str, weights: Precision, gpu: Gpu) -> str:
    """KV cache of a row that does not state it: 16 bit, but for engines that take what quantised checkpoints ask for."""
    low = weights.bits <= 8 and not weights.weight_only and "fp8" in gpu.peak_tflops
    table: dict[str, str] = tables()["unsaid_kv_cache"]
    return table.get(engine, table["otherwise"]) if low else table["otherwise"]


def _parallel(row: dict[str, str]) -> tuple[int, int, int, int]:
    """tensor_parallel, pipeline_parallel, expert_parallel, attention_data_parallel of a row; unsaid = the fewest that hold it."""
    note = {k: int(v) for k, v in re.findall(r"(attn_dp|moe_tp|moe_ep)=(\d+)", row["note"])}
    pipeline = int(_number(row["pp"], 1))
    named = re.fullmatch(tables()["layout_id"], row["source"].lower())
    if named:
        group, experts = int(named[1]), int(named[2])
        return group, pipeline, experts, group if note.get("attn_dp", 1) > 1 else 1
    tensor = int(_number(row["tp"], 0)) or int(_number(row["n_gpus"], 1)) // pipeline
    experts = note.get("moe_ep", 1) or 1
    group = max(tensor * max(1, note.get("attn_dp", 1)), note.get("moe_tp", 1) * experts, 1)
    return group, pipeline, experts, max(1, group // max(tensor, 1))


def _links(gpu: Gpu, catalog: Catalog) -> Link | None:
    return catalog.links.get(getattr(gpu, "default_link", "") or "")


def _gpu(row: dict[str, str], catalog: Catalog) -> Gpu:
    name, reason = _match("gpus", row["gpu"])
    if name is None:
        raise SkipError(reason)
    if name not in catalog.gpus:
        raise SkipError(f"{name} is not in the hardware catalog")
    return catalog.gpus[name]


def _shard(
    row: dict[str, str], run: dict[str, Any], model: ModelSpec, engine: str, catalog: Catalog
) -> tuple[Shard, int]:
    """How the model was cut and stored, and how many replicas ran."""
    gpu = _gpu(row, catalog)
    weights = precision(run["precision"]) if "precision" in run else _precision(row["precision_w"], model, gpu)
    peak_flops(gpu, weights.compute_dtype)
    kv = kv_dtype(row["kv_dtype"] or run.get("kv_dtype") or _unsaid_kv(engine, weights, gpu))
    tensor, pipeline, experts, attention = _parallel(row)
    replicas = 1
    if row["load_kind"].startswith("mlperf"):
        tensor, replicas = _smallest_group(model, gpu, weights, int(_number(row["n_gpus"], 1)))
    link = _links(gpu, catalog)
    links = link if tensor > 1 else None, link if pipeline > 1 else None
    return Shard(gpu, weights, kv, tensor, pipeline, *links, experts, attention), replicas


def read_case(index: int, row: dict[str, str], catalog: Catalog) -> Case:
    """What a row says, or SkipError with the reason."""
    if row["metric"] not in METRICS:
        raise SkipError(f"{row['metric']} is not a time or a rate (memory rows are replayed elsewhere)")
    if "SUSPECT" in row["note"]:
        raise SkipError("flagged SUSPECT in the source")
    unlike = tables()["unlike"].get(row["model"].lower(), "") if row["load_kind"].startswith("mlperf") else ""
    if unlike:
        raise SkipError(unlike)
    _gpu(row, catalog)
    engine_name, generation, batching, budget = _match("engines", row["engine"], row["engine_version"])
    model = load_model(tables()["models"].get(row["model"].lower(), row["model"]), offline=True)
    run = run_facts(row)
    shard, replicas = _shard(row, run, model, engine_name, catalog)
    generation, budget = run.get("generation", generation), run.get("max_num_batched_tokens", budget)
    version = f"{generation}{EXPERTS_OF}{run['experts']}" if "experts" in run else generation
    vendors = (shard.gpu.vendor,)
    engine = EngineSpec(
        engine_name, version, vendors, 0.0, batching, True, True, True, True, "any", "", (), {}, "", False
    )
    tokens, output = _lengths(row)
    load = _load(row)
    _, equal, one_prompt, in_step = (
        _match("closed_loops", row["source"])
        if row["load_kind"] == "closed_loop"
        else (1.0, row["isl"] in tables()["equal_answers"]["prompt_tokens"], False, False)
    )
    budget = min(budget, tokens + int(load or 0)) if one_prompt else budget
    pause = _pause(run, shard.attention_data_parallel)
    kind, metric = row["load_kind"], row["metric"]
    return Case(
        index, model, shard, engine, budget, tokens, output, kind, load, metric, replicas, equal, in_step, pause
    )


def run_facts(row: dict[str, str]) -> dict[str, Any]:
    """What the public script of the row's run sets, from the table `runs`; {} where none is known."""
    found: dict[str, Any] = {}
    for entry in tables()["runs"]:
        if all(re.fullmatch(pattern, row[column].strip().lower()) for column, pattern in entry["where"].items()):
            found = {**entry["facts"], **found}
    return found


def _pause(run: dict[str, Any], groups: int) -> Pause:
    """How long the run holds prompts back."""
    if groups > 1:
        return Pause(float(run.get("balance_steps", 0)), 0.0)
    return Pause(float(run.get("wait_steps", 0)), float(run.get("wait_share", 0)))


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
        float(tables()["datasets"][row["model"].lower()]["tokens"]) if text == "MLPerf dataset" else _number(text, 128)
    )
    output = _number(row["osl"], 128)
    if row["load_kind"] == "closed_loop":
        share = _match("closed_loops", row["source"])[0]
        tokens, output = tokens * share, output * share
    return max(1, round(tokens)), max(1, round(output))


def _load(row: dict[str, str]) -> float | None:
    text, kind = row["batch_or_concurrency"], row["load_kind"]
    if kind in ("offline_saturated", "mlperf_offline", "mlperf_server") or text in ("max", "qps=INF"):
        return _number(text) if "max_num_seqs" in text else None
    return _number(text, 1)


def slots(case: Case) -> float:
    """Sequences whose KV cache fits beside the weights, on the whole replica; an engine sets aside all or half of an answer."""
    table, shard = tables()["saturated"], case.shard
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

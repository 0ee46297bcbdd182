"""Replays measured serving-memory rows (columns of memory_measured.csv): one prediction a row, or the reason for none.

Only the row's own words and numbers steer a prediction; what they do not state takes the engine's default.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from planner.errors import PlannerError
from planner.estimator.memory.activations import activation_bytes, activation_cost
from planner.estimator.memory.kv_cache import StageKv, pool_tokens, sequence_bytes, stages_kv
from planner.estimator.memory.rules import MemoryRules, memory_rules
from planner.estimator.memory.runtime import graphs_bytes, runtime_bytes
from planner.estimator.memory.weights import stage_sizes, stage_weights_bytes
from planner.models import load_model
from planner.models.precision import kv_dtype, precision
from planner.models.spec import Attention, LatentAttention, ModelSpec
from planner.units import GIB
from planner.validate.prediction import Prediction

Row = dict[str, str]
_TOTAL = re.compile(r"\(\s*([\d.]+)\s*GiB\s*\)")
_NUMBER_IN_NOTE = r"{}\s*[= ]\s*(\d+)"


class _SkipError(Exception):
    """A row without prediction, and why."""


@dataclass(frozen=True)
class Run:
    """One start of an engine, as a row states it. total_gib: what the engine saw, None when the GPU is not stated."""

    model: ModelSpec
    rules: MemoryRules
    precision: str
    kv_cache_dtype: str
    tensor_parallel: int
    pipeline_parallel: int
    attention_data_parallel: int
    total_gib: float | None
    fast_link: bool
    share: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_tokens: int | None


@cache
def _words() -> Any:
    from importlib.resources import files

    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = files("planner.validate").joinpath("memory_rows.yaml").read_text("utf-8")
    return yaml.load(text, loader)  # noqa: S506 (safe loader)


def replay(rows: list[Row]) -> list[Prediction]:
    """One Prediction per row, in order; the unit is that of the row's metric. Rows of training go to the training estimators."""
    from planner.validate.accuracy_training import replay_memory_training

    training = [row.get("task", "infer") != "infer" for row in rows]
    trained = iter(replay_memory_training([row for row, train in zip(rows, training, strict=True) if train]))
    return [next(trained) if train else _one(row) for row, train in zip(rows, training, strict=True)]


def _one(row: Row) -> Prediction:
    try:
        metric = row["metric"]
        if metric not in _METRICS:
            raise _SkipError(f"metric {metric} is not a memory figure this replay predicts")
        run = _run(
            tuple((k, v) for k, v in row.items() if k not in ("id", "metric", "value", "outcome", "source", "evidence"))
        )
        value = float(_METRICS[metric](run))
    except _SkipError as reason:
        return Prediction(None, None, None, str(reason))
    except PlannerError as error:
        return Prediction(None, None, None, error.what)
    width = abs(value) * _words()["range_percent"][metric][0 if run.rules.verified else 1] / 100
    return Prediction(value, value - width, value + width)


def _whole(row: Row, name: str, default: int | None = None) -> int:
    text = row.get(name, "").strip()
    if not text and default is not None:
        return default
    if not re.fullmatch(r"\d{1,9}(\.0)?", text) or float(text) < 1:
        raise _SkipError(f"{name} is not stated" if not text else f"{name} {text[:20]!r} is not a count")
    return int(float(text))


@cache
def _run(fields: tuple[tuple[str, str], ...]) -> Run | Any:
    row = dict(fields)
    engine = _words()["engine"].get(row.get("engine", "").strip().lower())
    if engine is None:
        raise _SkipError(f"engine {row.get('engine', '')[:40] or 'not stated'} is not modelled")
    note = row.get("note", "")
    model = load_model(re.sub(r"\s*\(.*?\)\s*$", "", row["model"]), offline=True)
    rules = memory_rules(engine, row.get("engine_version", ""))
    tp, pp = _whole(row, "tp"), _whole(row, "pp")
    groups = max(1, _whole(row, "n_gpus", tp * pp) // (tp * pp))
    spread = groups if model.is_moe and groups > 1 else 1
    total = _total_gib(row.get("gpu", ""))
    limits = _scheduler(total, row.get("gpu", ""))
    method = _precision(row.get("quant", ""), model)
    return Run(
        model,
        rules,
        method,
        _cache_dtype(note, method),
        tp * spread,
        pp,
        spread,
        total,
        _fast_link(row.get("gpu", "")),
        _share(row, rules),
        _whole(row, "max_model_len", model.max_context),
        _whole(row, "batch", _in_note(note, "max_num_seqs") or limits["seqs"]),
        _in_note(note, "max_num_batched_tokens") or limits["tokens"],
        _in_note(note, "block size"),
    )


def _scheduler(total_gib: float | None, gpu: str) -> dict[str, int]:
    """The engine's own limits of sequences and tokens in a batch, where a row states none."""
    table = _words()["scheduler"]
    large = total_gib is not None and total_gib >= table["large_gib"]
    excepted = any(word in gpu.lower() for word in table["not_large"])
    found: dict[str, int] = table["large" if large and not excepted else "small"]
    return found


def _share(row: Row, rules: MemoryRules) -> float:
    text = row.get("gpu_mem_util", "").strip()
    if not text:
        return rules.default_share
    if not re.fullmatch(r"0?\.\d+|1(\.0*)?", text):
        raise _SkipError(f"gpu_mem_util {text[:20]!r} is not a fraction")
    return float(text)


def _in_note(note: str, name: str) -> int | None:
    found = re.search(_NUMBER_IN_NOTE.format(re.escape(name)), note)
    return int(found[1]) if found else None


def _precision(quant: str, model: ModelSpec) -> str:
    name = _words()["quant"].get(quant.strip().lower())
    if name is None:
        raise _SkipError(f"quantisation {quant[:40]!r} is not modelled")
    if name == "native":
        return model.native_precision
    same_bits = precision(name).bits == precision(model.native_precision).bits
    return model.native_precision if same_bits and name != "fp16" and precision(name).bits < 16 else str(name)


def _cache_dtype(note: str, method: str) -> str:
    found = re.search(r"kv_cache_dtype\s*=\s*(\w+)", note)
    stated = found[1].lower() if found else "auto"
    if stated.startswith("fp8"):
        return "fp8_e5m2" if "e5m2" in stated else "fp8"
    return "fp32" if method == "fp32" else "bf16"


def _total_gib(gpu: str) -> float | None:
    """Total memory that the row states in brackets, else the catalog's usable memory of that GPU."""
    stated = _TOTAL.search(gpu)
    if stated:
        return float(stated[1])
    if not gpu.strip() or "+" in gpu:
        return None
    from planner.hardware.catalog import load_catalog
    from planner.hardware.names import find_gpu

    try:
        return float(find_gpu(gpu, load_catalog()).usable_gib)
    except PlannerError:
        return None


def _fast_link(gpu: str) -> bool:
    return not any(word in gpu.lower() for word in _words()["slow_link"])


def _kv(run: Run) -> tuple[StageKv, ...]:
    from dataclasses import replace

    rules = (
        run.rules
        if run.block_tokens is None
        else replace(run.rules, kv=replace(run.rules.kv, block_tokens=run.block_tokens))
    )
    return stages_kv(
        run.model,
        kv_dtype(run.kv_cache_dtype),
        run.tensor_parallel,
        run.pipeline_parallel,
        run.attention_data_parallel,
        rules,
    )


def _weights(run: Run) -> tuple[float, ...]:
    experts = run.attention_data_parallel
    return stage_weights_bytes(
        run.model,
        precision(run.precision),
        run.tensor_parallel,
        run.pipeline_parallel,
        experts,
        run.attention_data_parallel,
        run.rules,
    )


def _activation(run: Run, stage: int) -> float:
    cost = activation_cost(
        run.model,
        run.precision,
        run.tensor_parallel,
        run.attention_data_parallel,
        stage == run.pipeline_parallel - 1,
        run.rules,
    )
    return float(activation_bytes(cost, run.max_num_seqs, run.max_num_batched_tokens))


def _runtime(run: Run) -> float:
    return runtime_bytes(run.rules, run.tensor_parallel, run.pipeline_parallel, run.fast_link)


def _graphs(run: Run, stage: int = 0) -> float:
    return graphs_bytes(
        run.rules, run.model, run.tensor_parallel, stage_sizes(len(run.model.layers), run.pipeline_parallel)[stage]
    )


def _pool(run: Run, stage: int) -> float:
    """Bytes left for the cache by the engine's rule; negative when there is no room."""
    if run.total_gib is None:
        raise _SkipError("the GPU is not stated or not in the catalog, so what is left for the cache is not known")
    inside = _weights(run)[stage] + _runtime(run) + (_graphs(run, stage) if run.rules.graphs_in_budget else 0.0)
    if not run.rules.activation.outside_budget:
        inside += _activation(run, stage)
    total = run.total_gib * GIB
    return run.share * (total - inside) if run.rules.budget == "share_of_free" else run.share * total - inside


def _tokens(run: Run) -> int:
    stages = enumerate(_kv(run))
    return min(
        pool_tokens(kv, _pool(run, i), run.rules.kv, run.max_model_len, run.max_num_batched_tokens) for i, kv in stages
    )


def _concurrency(run: Run) -> float:
    need = [float(sequence_bytes(kv, run.max_model_len, run.max_num_batched_tokens)) for kv in _kv(run)]
    return min(max(0.0, _pool(run, i)) / bytes_ for i, bytes_ in enumerate(need))


def _needed(run: Run) -> float:
    """Cache of one sequence of max_model_len over all stages (what the start-up error compares with one stage)."""
    return sum(float(sequence_bytes(kv, run.max_model_len, run.max_num_batched_tokens)) for kv in _kv(run))


def _longest(run: Run) -> float:
    pool = min(_pool(run, i) for i in range(run.pipeline_parallel))
    return max(0.0, pool) / _needed(run) * run.max_model_len


def _heads(run: Run) -> int:
    found = [
        m.heads
        for layer, _ in run.model.layer_groups
        for m in layer.mixers
        if isinstance(m, Attention | LatentAttention)
    ]
    if not found:
        raise _SkipError("the model has no attention heads")
    return found[0]


_METRICS: dict[str, Callable[[Run], float]] = {
    "weights_gib_per_gpu": lambda run: _weights(run)[0] / GIB,
    "activation_gib": lambda run: _activation(run, 0) / GIB,
    "non_torch_gib": lambda run: _runtime(run) / GIB,
    "cudagraph_gib": lambda run: _graphs(run) / GIB,
    "kv_gib": lambda run: _pool(run, 0) / GIB,
    "kv_gb": lambda run: _pool(run, 0) / 1e9,
    "kv_tokens": _tokens,
    "kv_blocks16": lambda run: _tokens(run) / 16,
    "max_concurrency": _concurrency,
    "kv_gib_needed": lambda run: _needed(run) / GIB,
    "est_max_model_len": _longest,
    "num_attention_heads": _heads,
    "vocab_size": lambda run: run.model.vocab,
}


def derived(rows: list[Row], predictions: list[Prediction]) -> list[tuple[str, str, float, float]]:
    """(metric, class, predicted, measured) of figures that two rows of a run make together: cache bytes per token."""
    runs: dict[str, dict[str, tuple[Row, Prediction]]] = {}
    for row, prediction in zip(rows, predictions, strict=True):
        if prediction.predicted is not None and row["metric"] in ("kv_gib", "kv_tokens"):
            runs.setdefault(row.get("id", "").rpartition("/")[0], {})[row["metric"]] = (row, prediction)
    found = []
    for pair in runs.values():
        if len(pair) < 2:
            continue
        (row, size), (other, tokens) = pair["kv_gib"], pair["kv_tokens"]
        values = [float(v) for v in (size.predicted or 0, tokens.predicted or 0, row["value"], other["value"])]
        if min(values) <= 0:
            continue
        plain = _uniform(load_model(row["model"], offline=True))
        group = (
            f"{row.get('engine', '')} {row.get('evidence', '')}, {'dense and MLA' if plain else 'sliding and hybrid'}"
        )
        found.append(("kv_bytes_per_token", group, values[0] * GIB / values[1], values[2] * GIB / values[3]))
    return found


def _uniform(model: ModelSpec) -> bool:
    mixers = [m for layer, _ in model.layer_groups for m in layer.mixers]
    return all(isinstance(m, LatentAttention) or (isinstance(m, Attention) and m.kind == "full") for m in mixers)

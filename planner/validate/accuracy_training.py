"""Replay of published training measurements: each row becomes model, job, layout and hardware, and the estimators predict it.

Only facts of the row steer a prediction; per-framework constants are in engines/training.yaml. Rows that do not state recomputation take
it only when the layout would not fit otherwise. Half of the (model, gpu, source) groups are held back from any fit: half_of says which.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from planner.engines.training import Framework, stacks
from planner.errors import PlannerError
from planner.estimate.memory.training import training_memory
from planner.estimate.time.training import training_time
from planner.estimate.train_stages import layer_flops_per_token
from planner.hardware.records import Catalog
from planner.models.load import load_model
from planner.models.spec import Attention, DenseMlp, Layer, ModelSpec
from planner.request import OFFLOADS, TrainJob
from planner.space.hardware_classes import HardwareClass
from planner.space.train_rows import TrainRows
from planner.units import GB, GIB, MIB
from planner.validate.prediction import Prediction

TIME_METRICS = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")


class _SkipError(Exception):
    """A row that cannot be predicted, with the reason."""


@dataclass(frozen=True)
class Case:
    """One measured row as the estimators take it."""

    model: ModelSpec
    job: TrainJob
    framework: Framework
    hw: HardwareClass
    layout: tuple[int, ...]
    interleave: float
    metric: str
    recompute_stated: bool
    flops_attention: str
    hardware_flops: bool
    memory_unit: float = GIB
    process: bool = False


@cache
def tables() -> dict[str, Any]:
    """training_rows.yaml, loaded safely."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = files("planner.validate").joinpath("training_rows.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.load(text, loader)  # noqa: S506 (safe loader)
    return found


def half_of(row: dict[str, str]) -> int:
    """0: the row may be fitted; 1: held back. By (model, gpu, source repository)."""
    key = "|".join((row["model"], row["gpu"].split(" ")[0], row["source"].split("@")[0]))
    return hashlib.sha256(key.encode()).digest()[0] & 1


def _number(text: str, default: float | None = None) -> float:
    match = re.search(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", text or "")
    if match:
        return float(match[0])
    if default is None:
        raise _SkipError("a number that the estimate needs is not stated")
    return default


def dense_model(row: dict[str, str]) -> ModelSpec:
    """A model of equal dense layers from the dimensions of the row; two or three matrices as the parameter count says."""
    layers, hidden, heads, vocab = (int(_number(row[c])) for c in ("layers", "hidden", "heads", "vocab"))
    kv, width = int(_number(row["kv_heads"], heads)), int(_number(row["ffn"]))
    return _dense(row["model"], (layers, hidden, heads, kv, width, vocab), _number(row["params_b"], 0.0) * 1e9)


@lru_cache(maxsize=1024)
def _dense(name: str, dims: tuple[int, ...], stated: float) -> ModelSpec:
    layers, hidden, heads, kv, width, vocab = dims

    def build(gated: bool, tied: bool) -> ModelSpec:
        layer = Layer((Attention(heads, kv, hidden // heads),), DenseMlp(width, gated), 2 * hidden)
        return ModelSpec(name, "dense", hidden, vocab, 1 << 21, (layer,) * layers, tied, hidden)

    choices = [build(g, t) for g in (False, True) for t in (True, False)]
    return min(choices, key=lambda m: abs(m.params_total - stated))


def _model(row: dict[str, str]) -> ModelSpec:
    name = tables()["models"].get(row["model"])
    if name:
        return load_model(name, offline=True)
    dims = tables()["dimensions"].get(row["model"])
    if dims:
        return _dense(row["model"], tuple(dims), _number(row["params_b"]) * 1e9)
    if not row["layers"] or not row["ffn"] or "x" in row["ffn"] or row["kv_heads"] == "MLA":
        raise _SkipError(f"dimensions of {row['model']} are not in the row")
    return dense_model(row)


def _hardware(row: dict[str, str], catalog: Catalog, fabric: str | None) -> HardwareClass:
    place = tables()["gpus"].get(row["gpu"].split(" ")[0])
    if place is None or place["gpu"] not in catalog.gpus:
        raise _SkipError(f"{row['gpu']} is not in the hardware catalog")
    gpu = catalog.gpus[place["gpu"]]
    link = catalog.links["nvlink5-nvl72"] if place["per_node"] == 72 else catalog.links[gpu.default_link]
    return HardwareClass(gpu, place["per_node"], link, catalog.links[fabric or place["fabric"]], ())


def _precision(text: str) -> str:
    for part, dtype in tables()["precisions"]:
        if part in text.lower():
            return str(dtype)
    raise _SkipError(f"precision {text!r} is not stated or not known")


def _optimizer(row: dict[str, str]) -> str:
    text = row["optimizer"].lower()
    if "8bit" in text or "8-bit" in text:
        return "paged-adamw-8bit" if "paged" in text else "adamw-8bit"
    pure = "bf16 (params" in row["precision"] or "bf16-true" in row["precision"] or row["precision"] in ("bf16", "nf4 + bf16", "nf4+bf16")
    if pure and row["source"].split("@")[0] in tables()["pure_bf16"]:
        return "adamw-bf16"
    if row["precision"] == "bf16" and "llm-foundry" in row["source"]:
        return "adamw-bf16"
    return "adamw"


def _method(row: dict[str, str]) -> str:
    task = row["task"].rstrip("?")
    if task in ("pretrain", "full-ft", "sft"):
        return "full"
    if task in ("lora", "qlora"):
        return "qlora" if "nf4" in row["precision"] or "4bit" in row["precision"] else "lora"
    raise _SkipError(f"{task} is not one of full, LoRA, QLoRA")


def _zero(row: dict[str, str]) -> int:
    text = row["zero_or_fsdp_stage"].lower()
    match = re.search(r"zero ?(\d)", text)
    if match:
        return int(match[1])
    return 3 if "full_shard" in text else 0


def _offload(row: dict[str, str]) -> int:
    text = row["offload"].lower()
    if "activations" in text:
        raise _SkipError("activation offload is not modelled")
    if "param" in text or "deepspeed" in text:
        return OFFLOADS.index("optimizer+parameters")
    return OFFLOADS.index("optimizer") if "optimizer" in text else 0


def _variant(row: dict[str, str], stack: str, chunked: bool) -> tuple[str, bool]:
    """Stack and loss of a row that lists techniques; _SkipError for techniques that are not modelled."""
    table = tables()
    if any(word in row["optimizer"] for word in table["unmodelled"]):
        raise _SkipError(f"optimizer {row['optimizer']!r} is not modelled or not stated")
    match = re.search(r"cumulative technique: ([^;]+)", row["notes"])
    if match is None:
        return stack, chunked or ("liger=true" in row["notes"] and "Not using use_liger" not in row["notes"])
    choice = table["cumulative"].get(match[1].strip())
    if choice is None:
        raise _SkipError(f"{match[1].strip()} is not modelled")
    return str(choice[0]), bool(choice[1])


def _source(row: dict[str, str]) -> dict[str, Any]:
    """How rows of this source are read; a source that is not listed is guessed from its words, else skipped."""
    table = tables()
    found: dict[str, Any] | None = table["sources"].get(row["source"].split("@")[0].split(" ")[0])
    if found is not None:
        return found
    text = " ".join((row["source"], row["notes"], row["zero_or_fsdp_stage"])).lower()
    for word, stack in table["guesses"]:
        if word in text:
            return {"stack": stack, "attention": "full"}
    raise _SkipError("the software of this source is not modelled")


def read_case(row: dict[str, str], catalog: Catalog) -> Case:
    """What a row of training_measured.csv says; _SkipError with the reason when it says too little."""
    if "SUSPECT" in row["notes"]:
        raise _SkipError("flagged SUSPECT in the source")
    table = tables()
    source = _source(row)
    if table["maxtext"]["match"] in row["zero_or_fsdp_stage"]:
        raise _SkipError(table["maxtext"]["reason"])
    if "VP n/a" in row["notes"] or "(assumed" in row["seq_len"]:
        raise _SkipError("a number that the estimate needs is not stated")
    if "packing=false" in row["notes"] or "sample_packing=false" in row["notes"]:
        raise _SkipError("samples are not packed and their lengths are not stated")
    if "OOM" in row["value"]:
        raise _SkipError("out of memory: a verdict, not a number")
    zero, method = _zero(row), _method(row)
    name = source["stack"]
    if name in ("hf_trainer", "axolotl", "litgpt") and int(_number(row["n_gpus"], 1)) > 1:
        name = {"axolotl": "fsdp2", "litgpt": "litgpt_fsdp"}.get(name, "deepspeed" if "zero" in row["zero_or_fsdp_stage"][:4] else "fsdp2")
    name, chunked = _variant(row, name, bool(source.get("chunked_loss")))
    framework = stacks()[name]
    model = _model(row)
    seq = int(_number(row["seq_len"]))
    data = int(_number(row["dp"], 1))
    micro = row["micro_batch"]
    batch = _number(row["global_batch"], 0.0) if not row["global_batch"].startswith("mbs") else 0.0
    if micro == "" and row["metric"] in TIME_METRICS:
        raise _SkipError("the micro-batch is not stated")
    mbs = int(_number(micro)) if "see source" not in micro else (2 if method == "qlora" else 8)
    accumulation = max(1, round(batch / (mbs * data))) if batch else 1
    if row["global_batch"].startswith("mbs"):
        accumulation = int(_number(row["global_batch"], 1))
    interval = 0 if row["recompute"].startswith("none") else (1 if row["recompute"].startswith("full") else 0)
    stated = not row["recompute"].startswith("not stated")
    job = TrainJob(
        method=method, seq_len=seq, optimizer=_optimizer(row), precision=_precision(row["precision"]), chunked_loss=chunked,  # type: ignore[arg-type]
        lora_rank=int(_number((re.search(r"lora_r(?:ank)?=(\d+)", row["notes"]) or ["", "8"])[1])),
    )  # fmt: skip
    layout = (
        0, int(_number(row["tp"], 1)), int(_number(row["pp"], 1)), int(_number(row["cp"], 1)), data, int(_number(row["ep"], 1)), zero, mbs,
        accumulation, interval, _offload(row),
    )  # fmt: skip
    hw = _hardware(row, catalog, source.get("fabric"))
    hardware = "HARDWARE" in row["notes"] or "hardware TFLOPs" in row["notes"]
    return Case(model, job, framework, hw, layout, _number(row["interleave"], 1), row["metric"], stated, source["attention"], hardware, GIB if source.get("gib") else GB, bool(source.get("process")))


def _group(cases: Sequence[tuple[int, Case]]) -> list[list[tuple[int, Case]]]:
    """Cases that one call of an estimator can take together."""
    groups: dict[Any, list[tuple[int, Case]]] = {}
    for number, case in cases:
        hw = (case.hw.gpu.name, case.hw.gpus_per_node, case.hw.fabric.name if case.hw.fabric else "")
        groups.setdefault((case.model, case.job, hw, case.framework), []).append((number, case))
    return list(groups.values())


def _settled(group: Sequence[Case]) -> list[Case]:
    """Recomputation that the source does not state is assumed only when the layout does not fit without."""
    first, rows = group[0], TrainRows.of([c.layout for c in group])
    memory = training_memory(first.model, first.job, first.hw, [first.framework], rows)
    fits = memory.peak_bytes <= memory.usable_bytes * tables()["recompute_margin"]
    return [
        c if c.recompute_stated or ok else replace(c, layout=(*c.layout[:9], 1, c.layout[10]))
        for c, ok in zip(group, fits.tolist(), strict=True)
    ]


def _flops_per_token(case: Case) -> float:
    """FLOPs of a token as the source counts them."""
    model, full = case.model, case.flops_attention == "full"
    body = 0.0
    for layer, count in model.layer_groups:
        whole, bare = layer_flops_per_token(layer, model.hidden, case.job.seq_len), 2.0 * layer.active_params(model.hidden)
        body += (bare + (whole - bare) * (2.0 if full else 1.0)) * count
    head = 2.0 * model.vocab * model.hidden
    if case.job.method != "full":
        return 2 * (body + head)
    return (4 * body + 3 * head) if case.hardware_flops else 3 * (body + head)


def _time_value(case: Case, tokens_per_gpu: float, step: float, peak: float) -> float:
    if case.metric == "step_time_s":
        return step
    if case.metric == "tokens_per_s_per_gpu":
        return tokens_per_gpu
    rate = tokens_per_gpu * _flops_per_token(case)
    return rate / 1e12 if case.metric == "tflops_per_gpu" else rate / peak


def _process_bytes(case: Case, allocated: float, usable: float) -> float:
    """What nvidia-smi shows: allocator peak with its cache (as far as the GPU has room), context, communicators."""
    n, world = case.framework.number, math.prod(case.layout[1:5])
    fixed = (n("context_gib") + (n("nccl_gib") if world > 1 else 0.0)) * GIB
    return max(allocated + fixed, min(allocated * (1 + n("cached_share")) + fixed, usable))


def _predict(group: Sequence[Case]) -> list[float]:
    """Predictions of cases that share model, job, hardware and framework, each in the unit of its metric."""
    from planner.estimate.time.kernels import peak_flops

    group = _settled(group)
    first, rows = group[0], TrainRows.of([c.layout for c in group])
    shared = (first.model, first.job, first.hw, [first.framework], rows)
    time = training_time(*shared, np.array([c.interleave for c in group]))
    memory, peak = training_memory(*shared), peak_flops(first.hw.gpu, first.job.precision)
    kinds, found = tables()["memory_rows"]["metrics"], []
    for i, case in enumerate(group):
        rate, alone = float(time.tokens_per_s_per_gpu[i]), float(memory.peak_bytes[i] - memory.runtime_bytes[i])
        kind = kinds.get(case.metric, "")
        if case.metric in TIME_METRICS:
            found.append(_time_value(case, rate, float(time.step_time_s[i]), peak))
        elif kind:
            sizes = {"rate": rate, "steady": memory.steady_bytes[i] / GIB, "peak": alone / GIB, "process": _process_bytes(case, alone, memory.usable_bytes[i]) / MIB}
            found.append(float(sizes[kind]))
        else:
            used = _process_bytes(case, alone, memory.usable_bytes[i]) if case.process else alone
            found.append(used / case.memory_unit)
    return found


def _replay(rows: Sequence[dict[str, str]], read: Callable[[dict[str, str], Catalog], Case], catalog: Catalog | None) -> list[Prediction]:
    if catalog is None:
        from planner.hardware.catalog import load_catalog

        catalog = load_catalog()
    found, cases = [Prediction(None, None, None, "not read")] * len(rows), []
    for number, row in enumerate(rows):
        try:
            cases.append((number, read(row, catalog)))
        except (_SkipError, PlannerError) as reason:
            found[number] = Prediction(None, None, None, str(reason))
    low, high = tables()["interval"]
    for group in _group(cases):
        try:
            for (number, _), value in zip(group, _predict([c for _, c in group]), strict=True):
                found[number] = Prediction(value, value * low, value * high)
        except PlannerError as reason:
            for number, _ in group:
                found[number] = Prediction(None, None, None, str(reason))
    return found


def replay(rows: Sequence[dict[str, str]], catalog: Catalog | None = None) -> list[Prediction]:
    """One Prediction for each row of training_measured.csv, in order, in the unit of the row's metric (GB for memory)."""
    return _replay(rows, read_case, catalog)


def read_memory_case(row: dict[str, str], catalog: Catalog) -> Case:
    """What a training row of memory_measured.csv says; _SkipError with the reason when it says too little."""
    table = tables()["memory_rows"]
    if row["task"] != "train":
        raise _SkipError("not a training row")
    if table["source"] not in row["source"]:
        raise _SkipError("a thread without the whole configuration: a verdict, see the tests of outcomes")
    if row["metric"] not in table["metrics"]:
        raise _SkipError(f"{row['metric']} is not predicted")
    if row["outcome"] != "fits":
        raise _SkipError("the run failed: a verdict, not a number")
    match = re.search(r"framework=(\S+).*ga=(\d+)\. (\d+) tok/sample", row["note"])
    if match is None or "moe-" in match[1]:
        raise _SkipError("kernels or tokens of a sample are not stated or not modelled")
    gpus, kernels = int(row["n_gpus"]), match[1]
    names = table["stacks"]["foak" if "foak" in kernels else "none"]
    framework = stacks()[names[1 if gpus > 1 else 0]]
    dims = table["dimensions"].get(row["model"])
    model = _listed(row["model"], tuple(dims)) if dims else load_model(table["names"].get(row["model"], row["model"]), offline=True)
    kind = row["quant"].split(" ", 1)
    frozen = table["frozen"].get(kind[1])
    method = "full" if kind[0] == "full" else ("qlora" if frozen else "lora")
    job = TrainJob(
        method=method, seq_len=int(match[3]), optimizer="adamw-bf16" if method == "full" else "adamw", precision="bf16",  # type: ignore[arg-type]
        lora_rank=table["lora"]["rank"], lora_targets=tuple(table["lora"]["targets"]), frozen_precision=frozen, chunked_loss="liger" in kernels,
    )  # fmt: skip
    layout = (0, 1, 1, 1, gpus, 1, 3 if gpus > 1 else 0, int(float(row["batch"])), int(match[2]), 1, 0)
    gpu = catalog.gpus["a100-sxm-80"]
    hw = HardwareClass(gpu, 8, catalog.links[gpu.default_link], catalog.links["roce-200g"], ())
    return Case(model, job, framework, hw, layout, 1.0, row["metric"], True, "causal", False)


@lru_cache(maxsize=16)
def _listed(name: str, dims: tuple[Any, ...]) -> ModelSpec:
    layers, hidden, width, heads, kv, vocab, gated = dims
    layer = Layer((Attention(heads, kv, hidden // heads),), DenseMlp(width, bool(gated)), 2 * hidden)
    return ModelSpec(name, "dense", hidden, vocab, 1 << 21, (layer,) * layers, True, hidden)


def replay_memory_training(rows: Sequence[dict[str, str]], catalog: Catalog | None = None) -> list[Prediction]:
    """One Prediction for each row of memory_measured.csv, in order, in the unit of its metric; rows of serving are skipped."""
    return _replay(rows, read_memory_case, catalog)

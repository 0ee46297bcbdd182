"""Published training measurements as cases: each row becomes model, job, layout and hardware, from the facts it states.

Which software a source ran, GPU names and units are in training_rows.yaml.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Any

from planner.engines.training import Framework, stacks
from planner.errors import PlannerError
from planner.hardware.records import Catalog
from planner.models.load import load_model
from planner.models.spec import ModelSpec
from planner.request import OFFLOADS, TrainJob, TrainMethod
from planner.space.hardware_classes import HardwareClass
from planner.units import GB, GIB, MIB
from planner.validate.training_models import SkipRowError, listed_model, model_of, number, special_model, tables
from planner.validate.training_scripts import (
    Script,
    adapter_rank,
    assumed_micro_batch,
    extra_constants,
    kernel_constants,
    samples_of,
    script_of,
)

TIME_METRICS = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")


@dataclass(frozen=True)
class Case:
    """One measured row as the estimators take it.

    shows: what its memory counts beside live tensors: "" = nothing, reserved = the allocator's cache, process = that, CUDA
    context and communicators. failed: the run ran out of memory, a reading ends where the GPU does. assumed: what was.
    """

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
    shows: str = ""
    failed: bool = False
    assumed: tuple[str, ...] = ()


def half_of(row: dict[str, str]) -> int:
    """0: the row may be fitted; 1: held back. By (model, gpu, source repository)."""
    key = "|".join((row["model"], row["gpu"].split(" ")[0], row["source"].split("@")[0]))
    return hashlib.sha256(key.encode()).digest()[0] & 1


def _catalog_name(name: str, catalog: Catalog) -> str:
    """Name of the GPU in the catalog; empty for one that it lacks."""
    from planner.hardware.names import find_gpu

    try:
        return find_gpu(name, catalog).name
    except PlannerError:
        return ""


def _hardware(row: dict[str, str], catalog: Catalog, fabric: str | None) -> HardwareClass:
    word = row["gpu"].split(" ")[0]
    place = tables()["gpus"].get(word) or {"gpu": _catalog_name(word, catalog), "per_node": 8, "fabric": "tcp-25g"}
    if place["gpu"] not in catalog.gpus:
        raise SkipRowError(f"{row['gpu']} is not in the hardware catalog")
    gpu = catalog.gpus[place["gpu"]]
    link = catalog.links["nvlink5-nvl72"] if place["per_node"] == 72 else catalog.links[gpu.default_link]
    return HardwareClass(gpu, place["per_node"], link, catalog.links[fabric or place["fabric"]], ())


def _precision(row: dict[str, str]) -> str:
    text = script_of(row).precision or row["precision"]
    for part, dtype in tables()["precisions"]:
        if part in text.lower():
            return str(dtype)
    raise SkipRowError(f"precision {text!r} is not stated or not known")


def _optimizer(row: dict[str, str], stack: str) -> str:
    text = row["optimizer"].lower()
    if "8bit" in text or "8-bit" in text or "single-device recipe" in text:
        return "paged-adamw-8bit" if "paged" in text or "single-device" in text else "adamw-8bit"
    if "muon" in text and stack == "megatron_bridge" and '"# adam' not in row["notes"]:
        return "muon"
    pure = (
        "bf16 (params" in row["precision"]
        or "bf16-true" in row["precision"]
        or row["precision"] in ("bf16", "nf4 + bf16", "nf4+bf16")
    )
    if pure and row["source"].split("@")[0] in tables()["pure_bf16"]:
        return "adamw-bf16"
    if row["precision"] == "bf16" and ("llm-foundry" in row["source"] or stack in tables()["pure_bf16_stacks"]):
        return "adamw-bf16" if _method(row) == "full" else "adamw"
    return "adamw"


def _method(row: dict[str, str]) -> TrainMethod:
    task = row["task"].rstrip("?")
    if task in ("pretrain", "full-ft", "sft") or script_of(row).trained_layers:
        return "full"
    if task in ("lora", "qlora") or adapter_rank(task) is not None:
        return "qlora" if re.search("nf4|[48] ?bit", row["precision"]) else "lora"
    raise SkipRowError(f"{task} is not one of full, LoRA, QLoRA")


def _zero(row: dict[str, str]) -> int:
    text = row["zero_or_fsdp_stage"].lower()
    match = re.search(r"zero ?(\d)", text)
    if match:
        return int(match[1])
    return 3 if "full_shard" in text else 0


def _offload(row: dict[str, str]) -> int:
    text = (script_of(row).offload or row["offload"]).lower()
    if "param" in text or "deepspeed" in text:
        return OFFLOADS.index("optimizer+parameters")
    return OFFLOADS.index("optimizer") if "optimizer" in text else 0


def _variant(row: dict[str, str], stack: str, chunked: bool) -> tuple[str, bool, str]:
    """Stack, loss and technique of a row that lists techniques; SkipRowError for techniques that are not modelled."""
    match = re.search(r"cumulative technique: ([^;]+)", row["notes"])
    if match is None:
        liger = "liger=true" in row["notes"] and "Not using use_liger" not in row["notes"]
        return stack, chunked or liger, ""
    choice = tables()["cumulative"].get(match[1].strip())
    if choice is None:
        raise SkipRowError(f"{match[1].strip()} is not modelled")
    return str(choice[0]), bool(choice[1]), str(choice[2])


def _source(row: dict[str, str]) -> dict[str, Any]:
    """How rows of this source are read; a source that is not listed is guessed from its words, else skipped."""
    table = tables()
    name = row["source"].split(" ")[0]
    found: dict[str, Any] | None = table["sources"].get(name, table["sources"].get(name.split("@")[0]))
    if found is not None:
        return found
    text = " ".join((row["source"], row["notes"], row["zero_or_fsdp_stage"])).lower()
    for word, stack in table["guesses"]:
        if word in text:
            return {"stack": stack, "attention": "full"}
    raise SkipRowError("the software of this source is not modelled")


def _unreadable(row: dict[str, str]) -> str:
    """Why a row cannot be replayed at all; empty when it can."""
    skip = tables()["maxtext"]
    if "SUSPECT" in row["notes"]:
        return "flagged SUSPECT in the source"
    if skip["match"] in row["zero_or_fsdp_stage"]:
        return str(skip["reason"])
    if "VP n/a" in row["notes"]:
        return "a number that the estimate needs is not stated"
    if "OOM" in row["value"] and row["metric"] in TIME_METRICS:
        return "out of memory: a verdict, not a number"
    if row["micro_batch"] == "" and row["metric"] in TIME_METRICS and assumed_micro_batch(row) is None:
        return "the micro-batch is not stated"
    return script_of(row).skip


def _tokens(row: dict[str, str]) -> tuple[int, tuple[str, ...]]:
    """Tokens of a sample, and what was assumed for them; the longest of a dataset where samples are padded, not packed."""
    limit, stated = int(number(row["seq_len"], 0.0)) or None, script_of(row).tokens
    if stated:
        return stated, (f"{stated} tokens a sample",)
    padded = "packing=false" in row["notes"] or "cumulative technique: Baseline" in row["notes"]
    if padded and row["metric"] in TIME_METRICS:
        raise SkipRowError("samples are not packed and their lengths are not stated")
    if padded or limit is None:
        found = samples_of(row, limit)
        if isinstance(found, str):
            raise SkipRowError(found)
        return found.longest, (found.assumed,)
    return limit, (f"{limit} tokens a sample",) if "assumed" in row["seq_len"] else ()


def _stack(row: dict[str, str], name: str) -> str:
    """Stack of a row whose source trains with several: by sharding and GPUs."""
    sharding = row["zero_or_fsdp_stage"]
    if script_of(row).stack:
        return script_of(row).stack
    alone = int(number(row["n_gpus"], 1)) == 1 and not sharding.startswith("zero")
    if name not in tables()["one_gpu"] or alone:
        return name
    if sharding.startswith("dist-optimizer"):
        return "megatron_bridge"
    if name in tables()["one_gpu_fsdp"]:
        return str(tables()["one_gpu_fsdp"][name])
    if sharding.startswith("zero"):
        return "deepspeed"
    return name if sharding == "ddp" else "fsdp2"


def _layout(row: dict[str, str], method: str) -> tuple[int, ...]:
    """The columns of TrainRows as the row states them."""
    data, stated = int(number(row["dp"], 1)), row["micro_batch"] or str(script_of(row).micro_batch or "")
    micro = stated or str(assumed_micro_batch(row) or "")
    mbs = int(number(micro)) if "see source" not in micro else (2 if method == "qlora" else 8)
    if row["global_batch"].startswith("mbs"):
        accumulation = int(number(row["global_batch"], 1))
    else:
        accumulation = max(1, round(number(row["global_batch"], mbs * data) / (mbs * data)))
    degrees = (int(number(row[axis], 1)) for axis in ("tp", "pp", "cp"))
    interval = int((script_of(row).recompute or row["recompute"]).startswith("full"))
    return (0, *degrees, data, int(number(row["ep"], 1)), _zero(row), mbs, accumulation, interval, _offload(row))


def read_case(row: dict[str, str], catalog: Catalog) -> Case:
    """What a row of training_measured.csv says; SkipRowError with the reason when it says too little."""
    reason = _unreadable(row)
    if reason:
        raise SkipRowError(reason)
    source, method = _source(row), _method(row)
    stack = _stack(row, source["stack"])
    script = script_of(row)
    whole = source.get("chunked_loss") if script.chunked_loss is None else script.chunked_loss
    name, chunked, technique = _variant(row, stack, bool(whole))
    tokens, assumed = _tokens(row)
    if not row["micro_batch"] and not script.micro_batch and assumed_micro_batch(row):
        assumed = (*assumed, f"micro-batch {assumed_micro_batch(row)}")
    job = TrainJob(
        method=method,
        seq_len=tokens,
        optimizer=_optimizer(row, stack),
        precision=_precision(row),
        chunked_loss=chunked,
        lora_rank=_rank(row),
        frozen_precision="int8-w8a8" if method == "qlora" and re.search("8 ?bit", row["precision"]) else None,
    )
    model, share = _trained(model_of(row), script)
    changed = extra_constants(row, technique) | share
    return Case(
        model=model,
        job=job,
        framework=_changed(stacks()[name], changed),
        hw=_hardware(row, catalog, source.get("fabric")),
        layout=_layout(row, method),
        interleave=number(row["interleave"], 1),
        metric=row["metric"],
        recompute_stated=not row["recompute"].startswith("not stated"),
        flops_attention=source["attention"],
        hardware_flops="hardware tflop" in row["notes"].lower(),
        memory_unit=GIB if source.get("gib") else GB,
        shows=script.shows or source.get("shows", ""),
        assumed=assumed,
    )


def _trained(model: ModelSpec, script: Script) -> tuple[ModelSpec, dict[str, float]]:
    """The model with the layers that the script adds, and the share of its parameters that is trained as a constant."""
    if not script.trained_layers:
        return model, {}
    grown = replace(model, layers=model.layers + model.layers[-1:] * script.added_layers)
    ends = grown.vocab * grown.hidden * (1 if grown.tie_embeddings else 2) * script.trained_ends
    trained = script.trained_layers * grown.layers[-1].params(grown.hidden) + ends
    return grown, {"trained_share": trained / grown.params_total}


def _rank(row: dict[str, str]) -> int:
    """LoRA rank: of the notes, of adapters that are like LoRA, else 8."""
    stated = re.search(r"lora_r(?:ank)?=(\d+)", row["notes"])
    return int(stated[1]) if stated else adapter_rank(row["task"].rstrip("?")) or 8


def _changed(framework: Framework, constants: dict[str, float]) -> Framework:
    return replace(framework, constants={**framework.constants, **constants}) if constants else framework


def read_memory_case(row: dict[str, str], catalog: Catalog) -> Case:
    """What a training row of memory_measured.csv says; SkipRowError with the reason when it says too little."""
    table = tables()["memory_rows"]
    if row["task"] != "train":
        raise SkipRowError("not a training row")
    if table["source"] not in row["source"]:
        raise SkipRowError("a thread without the whole configuration: a verdict, see the tests of outcomes")
    if row["metric"] not in table["metrics"]:
        raise SkipRowError(f"{row['metric']} is not predicted")
    failed = row["outcome"] != "fits"
    match = re.search(r"framework=(\S+).*ga=(\d+)\.(?: (\d+) tok/sample)?", row["note"])
    if match is None or not (match[3] or failed):
        raise SkipRowError("kernels or tokens of a sample are not stated or not modelled")
    gpus, kernels, padded = int(row["n_gpus"]), match[1], "_moe.csv" in row["source"]
    if padded and row["metric"] == "tok_s_per_gpu":
        raise SkipRowError("rate of padded micro-batches: lengths of their samples are not stated")
    longest = not match[3] or padded
    limit = row.get("max_model_len", "")
    tokens, batch = int(number(limit) if longest else int(match[3])), int(number(row["batch"]))
    if longest and match[3] and "padding-free" in kernels:  # the longest sample beside others of the mean length
        tokens = (tokens + (batch - 1) * int(match[3])) // batch
    names = table["stacks"]["foak" if "foak" in kernels else "none"]
    framework = _changed(stacks()[names[1 if gpus > 1 else 0]], kernel_constants(kernels, gpus))
    dims = table["dimensions"].get(row["model"])
    model = (
        listed_model(row["model"], tuple(dims))
        if dims
        else special_model(row["model"]) or load_model(table["names"].get(row["model"], row["model"]), offline=True)
    )
    kind = row["quant"].split(" ", 1)
    frozen = table["frozen"].get(kind[1])
    method: TrainMethod = "full" if kind[0] == "full" else ("qlora" if frozen else "lora")
    job = TrainJob(
        method=method,
        seq_len=tokens,
        optimizer="adamw-bf16" if method == "full" else "adamw",
        precision="bf16",
        lora_rank=table["lora"]["rank"],
        lora_targets=tuple(table["lora"]["targets"]),
        frozen_precision=frozen,
        chunked_loss="liger" in kernels,
    )
    spread = re.search(r"-ep(\d+)", kernels)
    layout = (
        0, 1, 1, 1, gpus, int(spread[1]) if spread else 1, 3 if gpus > 1 else 0, batch,
        int(match[2]), 1, 0,
    )  # fmt: skip
    gpu = catalog.gpus["a100-sxm-80"]
    hw = HardwareClass(gpu, 8, catalog.links[gpu.default_link], catalog.links["roce-200g"], ())
    unit = MIB if row["metric"].endswith("_mib") else GIB
    return Case(
        model, job, framework, hw, layout, 1.0, row["metric"], True, "causal", False, unit, failed=failed,
        assumed=(f"longest sample = the limit of {limit} tokens",) if longest else (),
    )  # fmt: skip

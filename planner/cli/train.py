"""The options of training, and the request they make."""

from __future__ import annotations

import math

from planner.cli import options as opt
from planner.cli.options import Given, Group, _flag, _text
from planner.errors import InvalidValueError
from planner.request import (
    METHODS,
    OFFLOADS,
    OPTIMIZERS,
    RISKS,
    TRAIN_PRECISIONS,
    TrainJob,
    TrainLimits,
    TrainPins,
    TrainRequest,
)
from planner.units import parse_count, parse_usd_per_hour

TRAIN: Group = {
    "method": _text("Train full weights, lora or qlora adapters.", "--method", default="full"),
    "tokens": _text("Training: tokens of the whole run: 1B.", "--tokens"),
    "samples": _text("Training: samples per epoch, instead of --tokens.", "--samples"),
    "sample_tokens": _text("Training: mean tokens of a sample (with --samples; default --seq-len).", "--sample-tokens"),
    "epochs": _text("Training: passes over the samples (with --samples).", "--epochs"),
    "seq_len": _text("Training: tokens of a sequence.", "--seq-len"),
    "no_packing": _flag("Training: one sample per sequence, padded, instead of packing.", "--no-packing"),
    "global_batch": _text(
        "Training: global batch in tokens (1M), sequences (256seq), or a range (0.5M..2M).", "--global-batch"
    ),
    "optimizer": _text(f"Training: {', '.join(OPTIMIZERS)}.", "--optimizer"),
    "lora_rank": _text("Training: rank of the adapters.", "--lora-rank"),
    "lora_targets": _text("Training: attention, mlp or attention,mlp.", "--lora-targets"),
    "chunked_loss": _flag("Training: chunked or fused cross entropy (no full logits).", "--chunked-loss"),
    "framework": _text("Pin the framework: deepspeed, fsdp2, torchtitan, megatron_bridge, ddp.", "--framework"),
    "deadline": _text("Training: the run must end within 24h.", "--deadline"),
    "step_time": _text("Training: longest step: 10s.", "--step-time"),
    "context_parallel": _text("Training: pin context parallelism.", "--context-parallel", "--cp"),
    "zero_stage": _text("Training: pin the ZeRO stage (0 to 3).", "--zero-stage"),
    "micro_batch_size": _text("Training: pin the micro-batch.", "--micro-batch-size"),
    "checkpoint_interval": _text(
        "Training: pin the layers per activation checkpoint (0 = none).", "--checkpoint-interval"
    ),
    "offload": _text(f"Training: pin the offload: {', '.join(OFFLOADS)}.", "--offload"),
}


def _from_zero(text: str | None, flag: str, most: int) -> int | None:
    """A whole number from 0 to most, or None."""
    if text is None:
        return None
    if not text.strip().isdigit() or int(text) > most:
        raise InvalidValueError(
            f"{flag} must be a whole number from 0 to {most}, not {text!r}", "", f"Write for example {flag} 1."
        )
    return int(text)


def _batch(text: str | None, seq_len: int) -> tuple[float | None, float | None]:
    """(fewest, most) tokens of '1M', '256seq' or '0.5M..2M'."""
    if text is None:
        return None, None

    def tokens(part: str) -> float:
        plain = part.strip()
        if plain.endswith("seq"):
            return parse_count(plain.removesuffix("seq"), "--global-batch") * seq_len
        return parse_count(plain, "--global-batch")

    low, dots, high = text.partition("..")
    first, last = tokens(low), tokens(high) if dots else tokens(low)
    if last < first:
        raise InvalidValueError(
            f"--global-batch {text!r} runs backwards", "the first number is the larger", "Write for example 0.5M..2M."
        )
    if last < seq_len:
        raise InvalidValueError(
            f"--global-batch {text!r} is less than one sequence of {seq_len} tokens",
            "",
            "Raise it, or lower --seq-len.",
        )
    return first, last


def _tokens(o: Given, seq_len: int) -> float:
    if o.get("tokens") is not None:
        if o.get("samples") is not None:
            raise InvalidValueError(
                "give either --tokens or --samples", "both say how long the run is", "Drop one of them."
            )
        if o.get("epochs") is not None:
            raise InvalidValueError("--epochs goes with --samples", "--tokens is the whole run", "Drop one of them.")
        return parse_count(o["tokens"], "--tokens")
    if o.get("samples") is None:
        raise InvalidValueError(
            "how long is the run?", "neither --tokens nor --samples was given", "Write for example --tokens 1B."
        )
    samples = parse_count(o["samples"], "--samples")
    each = opt.number(o.get("sample_tokens"), "--sample-tokens") or float(seq_len)
    if o.get("no_packing"):
        if each > seq_len:
            raise InvalidValueError(
                f"a sample of {each:g} tokens does not fit a sequence of {seq_len}",
                "with --no-packing each sample is one sequence, and its end would be cut off",
                f"Raise --seq-len to at least {math.ceil(each)}, shorten the samples, or drop --no-packing.",
            )
        each = float(seq_len)
    return samples * each * (opt.number(o.get("epochs"), "--epochs") or 1.0)


def _budgets(text: str | None) -> tuple[float | None, float | None]:
    """(whole run, per hour): '500' is the run, '20/h' the rate."""
    if text is None:
        return None, None
    if "/" in text:
        return None, parse_usd_per_hour(text, "--budget")
    return parse_count(text.strip().lstrip("$"), "--budget"), None


def train_request(o: Given) -> TrainRequest:
    """The training request of a command's options."""
    seq_len = opt.whole(o.get("seq_len"), "--seq-len") or 4096
    low, high = _batch(o.get("global_batch"), seq_len)
    total, hourly = _budgets(o.get("budget"))
    method = opt.one_of(o.get("method") or "full", METHODS, "training method")
    precision = opt.one_of(o.get("precision") or "bf16", TRAIN_PRECISIONS, "training precision")
    targets = tuple(
        opt.one_of(t.strip(), ("attention", "mlp"), "LoRA target")
        for t in (o.get("lora_targets") or "attention,mlp").split(",")
    )
    if method == "full" and (o.get("lora_rank") or o.get("lora_targets")):
        raise InvalidValueError(
            "--lora-rank and --lora-targets need adapters", "the method is full", "Add --method lora or --method qlora."
        )
    offload = o.get("offload")
    return TrainRequest(
        model=o["model"],
        goal=opt.one_of(o.get("goal") or "cheapest", ("cheapest", "fastest"), "goal of training"),  # type: ignore[arg-type]
        job=TrainJob(
            method=method,  # type: ignore[arg-type]
            tokens=_tokens(o, seq_len),
            seq_len=seq_len,
            packing=not o.get("no_packing"),
            batch_tokens_low=low,
            batch_tokens_high=high,
            optimizer=opt.one_of(o.get("optimizer") or "adamw", OPTIMIZERS, "optimizer"),
            precision=precision,
            lora_rank=opt.whole(o.get("lora_rank"), "--lora-rank") or 16,
            lora_targets=targets,
            chunked_loss=bool(o.get("chunked_loss")),
        ),
        limits=TrainLimits(
            opt.duration(o.get("deadline"), "--deadline"),
            opt.duration(o.get("step_time"), "--step-time"),
            total,
            hourly,
            opt.whole(o.get("max_gpus"), "--max-gpus"),
        ),
        hardware=opt.hardware_filter(o),
        risk=opt.one_of(o.get("risk") or "high", RISKS, "risk"),  # type: ignore[arg-type]
        pins=TrainPins(
            o.get("framework"),
            opt.whole(o.get("tensor_parallel"), "--tensor-parallel"),
            opt.whole(o.get("pipeline_parallel"), "--pipeline-parallel"),
            opt.whole(o.get("context_parallel"), "--context-parallel"),
            opt.whole(o.get("data_parallel"), "--data-parallel"),
            opt.whole(o.get("expert_parallel"), "--expert-parallel"),
            _from_zero(o.get("zero_stage"), "--zero-stage", 3),
            opt.whole(o.get("micro_batch_size"), "--micro-batch-size"),
            _from_zero(o.get("checkpoint_interval"), "--checkpoint-interval", 1000),
            None if offload is None else opt.one_of(offload, OFFLOADS, "offload"),
        ),
    )

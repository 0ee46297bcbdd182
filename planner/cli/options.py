"""The options that commands share, as groups, and the requests they make.

A command is a function of one dict; `command(*groups)` gives it the signature that typer reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from planner.errors import InvalidValueError, UnknownNameError
from planner.request import GOALS, RISKS, TIERS, HardwareFilter, Limits, Pins, ServeRequest, Workload
from planner.units import parse_count, parse_duration_s, parse_usd_per_hour

MOST = 1_000_000_000
SMALLEST, LARGEST = 1e-9, 1e18
Given = dict[str, Any]
Group = dict[str, tuple[Any, Any]]


def _text(help_text: str, *flags: str, default: str | None = None) -> tuple[Any, Any]:
    return Annotated[str | None, typer.Option(*flags, help=help_text)], default


def _many(help_text: str, *flags: str) -> tuple[Any, Any]:
    return Annotated[list[str] | None, typer.Option(*flags, help=help_text)], None


def _flag(help_text: str, *flags: str) -> tuple[Any, Any]:
    return Annotated[bool, typer.Option(*flags, help=help_text)], False


MODEL: Group = {
    "model": (
        Annotated[
            str,
            typer.Option("--model", "-m", help="Alias (70b, llama-3.1-8b), Hugging Face id, config.json or folder."),
        ],
        inspect.Parameter.empty,
    ),
    "task": _text("serve or train.", "--task", default="serve"),
}
GOAL: Group = {
    "goal": _text(
        "cheapest, fastest (lowest E2E, or shortest run) or throughput (most tokens/s).",
        "--goal",
        "-g",
        default="cheapest",
    ),
    "risk": _text(
        "high: limits are held against the prediction itself; low: against the bad end of its 80% range.",
        "--risk",
        default="high",
    ),
}
LOAD: Group = {
    "rate": _text("Requests per second to carry (default 1).", "--rate"),
    "concurrency": _text("Users with one request in flight each, instead of --rate.", "--concurrency"),
    "input_tokens": _text("Mean prompt length.", "--input-tokens", default="1024"),
    "output_tokens": _text("Mean answer length.", "--output-tokens", default="256"),
}
LIMITS: Group = {
    "latency": _text("Limit of time to first token, 95th percentile under load: 200ms.", "--latency", "--ttft"),
    "tpot": _text("Limit of time per output token: 40ms.", "--tpot"),
    "e2e": _text("Limit of the whole answer: 10s.", "--e2e"),
    "budget": _text("Most money: 20/h, 500/day, 10000/month; for training also of the whole run: 500.", "--budget"),
    "max_gpus": _text("Most GPUs in all machines.", "--max-gpus"),
    "min_throughput": _text("Fewest output tokens/s in all.", "--min-throughput"),
    "max_accuracy_loss": _text(
        "Expected loss of task accuracy allowed, in percent.", "--max-accuracy-loss", default="1%"
    ),
}
HARDWARE: Group = {
    "on": _text(
        "Own machines: 2xrtx-4090 (one machine), 8x8xa100-sxm-80 (8 machines of 8); kinds to choose among with commas.",
        "--on",
    ),
    "fabric_gbps": _text("Gbit/s between own machines.", "--fabric-gbps"),
    "provider": _many("Only this provider (repeatable, * as wildcard).", "--provider"),
    "region": _many("Only this region (repeatable, * as wildcard).", "--region"),
    "gpu": _many("Only this GPU (repeatable, * as wildcard).", "--gpu"),
    "instance": _many("Only this instance type (repeatable, * as wildcard).", "--instance"),
    "tier": _many("on_demand (default), spot or reserved (repeatable).", "--tier"),
    "catalog": (
        Annotated[
            list[str] | None, typer.Option("--catalog", help="Folder with own machines, prices, quotas (repeatable).")
        ],
        None,
    ),
}
PINS: Group = {
    "engine": _text("Pin the engine: vllm, sglang, tensorrt_llm, tgi, deepspeed_inference, transformers.", "--engine"),
    "precision": _text(
        "Pin the weights (serving: bf16, fp8, int4-awq, ...) or the compute dtype (training: bf16, fp16, fp8).",
        "--precision",
    ),
    "kv_cache_dtype": _text("Pin the KV cache: bf16, fp16, fp8, ...", "--kv-cache-dtype"),
    "tensor_parallel": _text("Pin tensor parallelism.", "--tensor-parallel", "--tp"),
    "pipeline_parallel": _text("Pin pipeline parallelism.", "--pipeline-parallel", "--pp"),
    "expert_parallel": _text(
        "Pin expert parallelism (serving: 1, or the tensor-parallel degree).", "--expert-parallel", "--ep"
    ),
    "attention_data_parallel": _text(
        "Pin the attention groups of a replica (1, or the tensor-parallel degree).",
        "--attention-data-parallel",
        "--attention-dp",
    ),
    "data_parallel": _text("Pin the number of replicas (training: of data-parallel ranks).", "--data-parallel", "--dp"),
    "max_model_len": _text("Longest request the engine must accept, in tokens.", "--max-model-len"),
    "unpublished": _flag("Also search formats of which no published checkpoint is known.", "--unpublished"),
    "max_num_seqs": _text("Pin the most sequences a replica runs at once.", "--max-num-seqs"),
}
JSON: Group = {"json": _flag("Print JSON instead of tables.", "--json")}


def command(*groups: Group) -> Callable[[Callable[[Given], int]], Callable[..., int]]:
    """Turn a function of one dict into a typer command with the options of the groups."""

    def wrap(function: Callable[[Given], int]) -> Callable[..., int]:
        def run(**given: Any) -> int:
            return function(given)

        options = {name: spec for group in groups for name, spec in group.items()}
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter(name, kind, default=default, annotation=hint) for name, (hint, default) in options.items()
        ]
        run.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
        run.__annotations__ = {name: hint for name, (hint, _) in options.items()}
        run.__doc__, run.__name__ = function.__doc__, function.__name__
        return run

    return wrap


def whole(text: str | None, flag: str) -> int | None:
    """A positive whole number, or None. '32k' counts."""
    if text is None:
        return None
    value = parse_count(text, flag, must="a positive whole number", example=f"{flag} 8")
    if value != int(value):
        raise InvalidValueError(f"{flag} must be a whole number, not {text!r}", "", f"Write for example {flag} 8.")
    if value > MOST:
        raise InvalidValueError(f"{flag} {text} is too large", f"at most {MOST:,}", f"Write for example {flag} 8.")
    return int(value)


def number(text: str | None, flag: str) -> float | None:
    """A positive number, or None."""
    value = None if text is None else parse_count(text, flag)
    if value is not None and not SMALLEST <= value <= LARGEST:
        raise InvalidValueError(
            f"{flag} {text} is out of range", f"{SMALLEST:g} to {LARGEST:g}", f"Write for example {flag} 1."
        )
    return value


def percent(text: str, flag: str) -> float:
    """'1', '1%' or '0' as percent."""
    try:
        return float(text.strip().removesuffix("%").strip())
    except ValueError:
        raise InvalidValueError(f"{flag} {text!r} is not a percentage", "", f"Write for example {flag} 1%.") from None


def one_of(text: str, known: tuple[str, ...], kind: str) -> str:
    """text when it is known, else UnknownNameError."""
    if text not in known:
        raise UnknownNameError(kind, text, known)
    return text


def duration(text: str | None, flag: str) -> float | None:
    """Seconds of a limit, or None."""
    return None if text is None else parse_duration_s(text, flag)


def hardware_filter(o: Given) -> HardwareFilter:
    """Where to look."""
    if o.get("on"):
        for name in ("provider", "region", "gpu", "instance", "tier"):
            if o.get(name):
                raise InvalidValueError(
                    f"--on and --{name} exclude each other", "--on names the machines", "Drop one of them."
                )
    if o.get("fabric_gbps") and not o.get("on"):
        raise InvalidValueError(
            "--fabric-gbps is for own machines", "rented machines have their own fabric", "Add --on or drop it."
        )
    for path in o.get("catalog") or ():
        if not str(path):
            raise InvalidValueError("--catalog is empty", "", "Name a folder, for example --catalog my_catalog.")
    tiers = tuple(one_of(t.replace("-", "_"), TIERS, "tier") for t in (o.get("tier") or ("on_demand",)))
    return HardwareFilter(
        tuple(o.get("provider") or ()),
        tuple(o.get("region") or ()),
        tuple(o.get("gpu") or ()),
        tuple(o.get("instance") or ()),
        tiers,
        o.get("on"),
        number(o.get("fabric_gbps"), "--fabric-gbps"),
        tuple(o.get("catalog") or ()),
    )


def serve_request(o: Given) -> ServeRequest:
    """The serving request of a command's options (keys are the parameter names of the command)."""
    if o.get("rate") is not None and o.get("concurrency") is not None:
        raise InvalidValueError(
            "give either --rate or --concurrency", "the load is one of the two", "Drop one of them."
        )
    users = whole(o.get("concurrency"), "--concurrency")
    goal = one_of(o.get("goal") or "cheapest", GOALS, "goal")
    if goal == "throughput" and o.get("rate") is not None:
        raise InvalidValueError(
            "--goal throughput takes no --rate",
            "it fills the hardware as far as the limits allow",
            "Drop --rate, or give --concurrency.",
        )
    budget = o.get("budget")
    return ServeRequest(
        model=o["model"],
        goal=goal,  # type: ignore[arg-type]
        workload=Workload(
            whole(o.get("input_tokens"), "--input-tokens") or 1024,
            whole(o.get("output_tokens"), "--output-tokens") or 256,
            None if users is not None else number(o.get("rate"), "--rate") or 1.0,
            users,
        ),
        limits=Limits(
            duration(o.get("latency"), "--latency"),
            duration(o.get("tpot"), "--tpot"),
            duration(o.get("e2e"), "--e2e"),
            None if budget is None else parse_usd_per_hour(budget, "--budget"),
            whole(o.get("max_gpus"), "--max-gpus"),
            percent(o.get("max_accuracy_loss") or "1%", "--max-accuracy-loss"),
            number(o.get("min_throughput"), "--min-throughput"),
        ),
        hardware=hardware_filter(o),
        pins=Pins(
            o.get("engine"),
            o.get("precision"),
            o.get("kv_cache_dtype"),
            whole(o.get("tensor_parallel"), "--tensor-parallel"),
            whole(o.get("pipeline_parallel"), "--pipeline-parallel"),
            whole(o.get("data_parallel"), "--data-parallel"),
            whole(o.get("max_model_len"), "--max-model-len"),
            whole(o.get("max_num_seqs"), "--max-num-seqs"),
            bool(o.get("unpublished")),
            whole(o.get("expert_parallel"), "--expert-parallel"),
            whole(o.get("attention_data_parallel"), "--attention-data-parallel"),
        ),
        risk=one_of(o.get("risk") or "high", RISKS, "risk"),  # type: ignore[arg-type]
    )


def refuse(o: Given, names: Group, but: str) -> None:
    """Options of the other task are an error, not something to be ignored."""
    for name, (_, default) in names.items():
        if o.get(name) not in (None, default, False):
            raise InvalidValueError(
                f"--{name.replace('_', '-')} is for --task {but}", "", f"Drop it, or add --task {but}."
            )


def refuse_for(o: Given, names: Group, needs: str) -> None:
    """Options that only make sense with another one are an error without it."""
    for name, (_, default) in names.items():
        if o.get(name) not in (None, default, False, []):
            raise InvalidValueError(f"--{name.replace('_', '-')} is for {needs}", "", f"Drop it, or add {needs}.")

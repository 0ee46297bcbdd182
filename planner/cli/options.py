"""The options that the serving commands share, and the request they make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from planner.errors import InvalidValueError, UnknownNameError
from planner.request import GOALS, TIERS, HardwareFilter, Limits, Pins, ServeRequest, Workload
from planner.units import parse_count, parse_duration_s, parse_usd_per_hour

MODEL = Annotated[
    str, typer.Option("--model", "-m", help="Alias (70b, llama-3.1-8b), Hugging Face id, config.json or model folder.")
]
GOAL = Annotated[
    str, typer.Option("--goal", "-g", help="cheapest, fastest (lowest E2E) or throughput (most tokens/s).")
]
LATENCY = Annotated[
    str | None,
    typer.Option("--latency", "--ttft", help="Limit of time to first token, 95th percentile under load: 200ms."),
]
TPOT = Annotated[str | None, typer.Option("--tpot", help="Limit of time per output token: 40ms.")]
E2E = Annotated[str | None, typer.Option("--e2e", help="Limit of the whole answer: 10s.")]
RATE = Annotated[str | None, typer.Option("--rate", help="Requests per second to carry (default 1).")]
CONCURRENCY = Annotated[
    str | None, typer.Option("--concurrency", help="Users with one request in flight each, instead of --rate.")
]
INPUT = Annotated[str, typer.Option("--input-tokens", help="Mean prompt length.")]
OUTPUT = Annotated[str, typer.Option("--output-tokens", help="Mean answer length.")]
BUDGET = Annotated[str | None, typer.Option("--budget", help="Most money per time: 20/h, 500/day, 10000/month.")]
MAX_GPUS = Annotated[str | None, typer.Option("--max-gpus", help="Most GPUs in all machines.")]
MIN_THROUGHPUT = Annotated[str | None, typer.Option("--min-throughput", help="Fewest output tokens/s in all.")]
MAX_LOSS = Annotated[
    str, typer.Option("--max-accuracy-loss", help="Expected loss of task accuracy allowed, in percent: 1%.")
]
ON = Annotated[
    str | None, typer.Option("--on", help="Own machines: 2xrtx-4090 (one machine), 8x8xa100-sxm-80 (8 machines of 8).")
]
FABRIC = Annotated[str | None, typer.Option("--fabric-gbps", help="Gbit/s between own machines.")]
PROVIDER = Annotated[list[str] | None, typer.Option("--provider", help="Only this provider (repeatable).")]
REGION = Annotated[list[str] | None, typer.Option("--region", help="Only this region (repeatable, * as wildcard).")]
GPU = Annotated[list[str] | None, typer.Option("--gpu", help="Only this GPU (repeatable).")]
INSTANCE = Annotated[list[str] | None, typer.Option("--instance", help="Only this instance type (repeatable).")]
TIER = Annotated[list[str] | None, typer.Option("--tier", help="on_demand (default), spot or reserved (repeatable).")]
CATALOG = Annotated[
    list[Path] | None, typer.Option("--catalog", help="Folder with own machines, prices, quotas (repeatable).")
]
ENGINE = Annotated[
    str | None,
    typer.Option(
        "--engine", help="Pin the engine: vllm, sglang, tensorrt_llm, tgi, deepspeed_inference, transformers."
    ),
]
PRECISION = Annotated[str | None, typer.Option("--precision", help="Pin the weights: bf16, fp16, fp8, int4-awq, ...")]
KV = Annotated[str | None, typer.Option("--kv-cache-dtype", help="Pin the KV cache: bf16, fp16, fp8, ...")]
TP = Annotated[str | None, typer.Option("--tensor-parallel", "--tp", help="Pin tensor parallelism.")]
PP = Annotated[str | None, typer.Option("--pipeline-parallel", "--pp", help="Pin pipeline parallelism.")]
DP = Annotated[str | None, typer.Option("--data-parallel", "--dp", help="Pin the number of replicas.")]
MAX_LEN = Annotated[
    str | None, typer.Option("--max-model-len", help="Longest request the engine must accept, in tokens.")
]
MAX_SEQS = Annotated[str | None, typer.Option("--max-num-seqs", help="Pin the most sequences a replica runs at once.")]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def whole(text: str | None, flag: str) -> int | None:
    """A positive whole number, or None. '32k' counts."""
    if text is None:
        return None
    value = parse_count(text, flag)
    if value != int(value):
        raise InvalidValueError(f"{flag} must be a whole number, not {text!r}", "", f"Write for example {flag} 8.")
    return int(value)


def number(text: str | None, flag: str, unit: str = "") -> float | None:
    """A positive number with an optional unit sign, or None."""
    if text is None:
        return None
    return parse_count(text.strip().removesuffix(unit) if unit else text, flag)


def percent(text: str, flag: str) -> float:
    """'1', '1%' or '0' as percent."""
    plain = text.strip().removesuffix("%").strip()
    try:
        value = float(plain)
    except ValueError:
        raise InvalidValueError(f"{flag} {text!r} is not a percentage", "", f"Write for example {flag} 1%.") from None
    return value


def one_of(text: str, known: tuple[str, ...], kind: str) -> str:
    """text when it is known, else UnknownNameError."""
    if text not in known:
        raise UnknownNameError(kind, text, known)
    return text


def duration(text: str | None, flag: str) -> float | None:
    """Seconds of a limit, or None."""
    return None if text is None else parse_duration_s(text, flag)


def make_request(o: dict[str, Any]) -> ServeRequest:
    """The request of a command's options (keys are the parameter names of the command)."""
    if o.get("rate") is not None and o.get("concurrency") is not None:
        raise InvalidValueError(
            "give either --rate or --concurrency", "the load is one of the two", "Drop one of them."
        )
    users = whole(o.get("concurrency"), "--concurrency")
    rate = number(o.get("rate"), "--rate") if o.get("rate") is not None else 1.0
    goal = one_of(o.get("goal", "cheapest"), GOALS, "goal")
    if goal == "throughput" and o.get("rate") is not None:
        raise InvalidValueError(
            "--goal throughput takes no --rate",
            "it fills the hardware as far as the limits allow",
            "Drop --rate, or give --concurrency.",
        )
    budget = o.get("budget")
    fabric = number(o.get("fabric_gbps"), "--fabric-gbps")
    tiers = tuple(one_of(t.replace("-", "_"), TIERS, "tier") for t in (o.get("tier") or ("on_demand",)))
    return ServeRequest(
        model=o["model"],
        goal=goal,  # type: ignore[arg-type]
        workload=Workload(
            whole(o.get("input_tokens", "1024"), "--input-tokens") or 0,
            whole(o.get("output_tokens", "256"), "--output-tokens") or 0,
            None if users is not None else rate,
            users,
        ),
        limits=Limits(
            duration(o.get("latency"), "--latency"),
            duration(o.get("tpot"), "--tpot"),
            duration(o.get("e2e"), "--e2e"),
            None if budget is None else parse_usd_per_hour(budget, "--budget"),
            whole(o.get("max_gpus"), "--max-gpus"),
            percent(o.get("max_accuracy_loss", "1%"), "--max-accuracy-loss"),
            number(o.get("min_throughput"), "--min-throughput"),
        ),
        hardware=HardwareFilter(
            tuple(o.get("provider") or ()),
            tuple(o.get("region") or ()),
            tuple(o.get("gpu") or ()),
            tuple(o.get("instance") or ()),
            tiers,
            o.get("on"),
            fabric,
            tuple(str(p) for p in (o.get("catalog") or ())),
        ),
        pins=Pins(
            o.get("engine"),
            o.get("precision"),
            o.get("kv_cache_dtype"),
            whole(o.get("tensor_parallel"), "--tensor-parallel"),
            whole(o.get("pipeline_parallel"), "--pipeline-parallel"),
            whole(o.get("data_parallel"), "--data-parallel"),
            whole(o.get("max_model_len"), "--max-model-len"),
            whole(o.get("max_num_seqs"), "--max-num-seqs"),
        ),
    )

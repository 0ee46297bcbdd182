"""solve, compare, estimate, memory: parse the options, call the planner, hand the result to the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli import options as opt
from planner.errors import EXIT_NO_PLAN, InvalidValueError

OUT = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for plan.yaml and the launch files.")]
FORCE = Annotated[bool, typer.Option("--force", help="Overwrite files in --out that planner did not write.")]
TIME_LIMIT = Annotated[str, typer.Option("--time-limit", help="Most time for the proof.")]


def solve(
    model: opt.MODEL,
    goal: opt.GOAL = "cheapest",
    latency: opt.LATENCY = None,
    tpot: opt.TPOT = None,
    e2e: opt.E2E = None,
    rate: opt.RATE = None,
    concurrency: opt.CONCURRENCY = None,
    input_tokens: opt.INPUT = "1024",
    output_tokens: opt.OUTPUT = "256",
    budget: opt.BUDGET = None,
    max_gpus: opt.MAX_GPUS = None,
    min_throughput: opt.MIN_THROUGHPUT = None,
    max_accuracy_loss: opt.MAX_LOSS = "1%",
    on: opt.ON = None,
    fabric_gbps: opt.FABRIC = None,
    provider: opt.PROVIDER = None,
    region: opt.REGION = None,
    gpu: opt.GPU = None,
    instance: opt.INSTANCE = None,
    tier: opt.TIER = None,
    catalog: opt.CATALOG = None,
    engine: opt.ENGINE = None,
    precision: opt.PRECISION = None,
    kv_cache_dtype: opt.KV = None,
    tensor_parallel: opt.TP = None,
    pipeline_parallel: opt.PP = None,
    data_parallel: opt.DP = None,
    max_model_len: opt.MAX_LEN = None,
    max_num_seqs: opt.MAX_SEQS = None,
    time_limit: TIME_LIMIT = "30s",
    out: OUT = None,
    force: FORCE = False,
    json: opt.JSON = False,
) -> int:
    """Find the best deployment, prove it, and write the files that launch it.

    Example: planner solve --model 70b --goal cheapest --latency 200ms --out plan/
    """
    from dataclasses import replace

    from planner.api import solve as solve_request
    from planner.report import console

    given = dict(locals())
    request = replace(opt.make_request(given), time_limit_s=opt.duration(time_limit, "--time-limit") or 30.0)
    plan = solve_request(request)
    written: list[Path] = []
    if out is not None and plan.deployment is not None:
        from planner.emit import write_files

        written = write_files(plan, out, force=force)
    console.show_plan(plan, json=json, written=written)
    return EXIT_NO_PLAN if plan.status == "infeasible" else 0


def compare(
    model: opt.MODEL,
    goal: opt.GOAL = "cheapest",
    latency: opt.LATENCY = None,
    tpot: opt.TPOT = None,
    e2e: opt.E2E = None,
    rate: opt.RATE = None,
    concurrency: opt.CONCURRENCY = None,
    input_tokens: opt.INPUT = "1024",
    output_tokens: opt.OUTPUT = "256",
    budget: opt.BUDGET = None,
    max_gpus: opt.MAX_GPUS = None,
    min_throughput: opt.MIN_THROUGHPUT = None,
    max_accuracy_loss: opt.MAX_LOSS = "1%",
    on: opt.ON = None,
    fabric_gbps: opt.FABRIC = None,
    provider: opt.PROVIDER = None,
    region: opt.REGION = None,
    gpu: opt.GPU = None,
    instance: opt.INSTANCE = None,
    tier: opt.TIER = None,
    catalog: opt.CATALOG = None,
    engine: opt.ENGINE = None,
    precision: opt.PRECISION = None,
    kv_cache_dtype: opt.KV = None,
    tensor_parallel: opt.TP = None,
    pipeline_parallel: opt.PP = None,
    max_model_len: opt.MAX_LEN = None,
    top: Annotated[int, typer.Option("--top", help="Show so many rows (0 = all).")] = 20,
    near_misses: Annotated[
        bool, typer.Option("--near-misses", help="Also show types that break exactly one limit.")
    ] = False,
    format_: Annotated[str, typer.Option("--format", help="table, json, csv or markdown.")] = "table",
    json: opt.JSON = False,
) -> int:
    """Every instance type that can do it, best configuration each, sorted by the goal.

    Example: planner compare --model 8b --rate 5 --provider aws --format markdown
    """
    from planner.api import compare as compare_request
    from planner.report import console

    given = dict(locals())
    shape = "json" if json else opt.one_of(format_, ("table", "json", "csv", "markdown"), "format")
    if top < 0:
        raise InvalidValueError(f"--top must be 0 or more, not {top}", "", "Write for example --top 20.")
    choices = compare_request(opt.make_request(given), near_misses=near_misses)
    console.show_choices(choices if top == 0 or shape != "table" else choices[:top], shape, total=len(choices))
    return 0 if any(c.fits for c in choices) else EXIT_NO_PLAN


def estimate(
    model: opt.MODEL,
    goal: opt.GOAL = "cheapest",
    rate: opt.RATE = None,
    concurrency: opt.CONCURRENCY = None,
    input_tokens: opt.INPUT = "1024",
    output_tokens: opt.OUTPUT = "256",
    on: opt.ON = None,
    fabric_gbps: opt.FABRIC = None,
    provider: opt.PROVIDER = None,
    region: opt.REGION = None,
    gpu: opt.GPU = None,
    instance: opt.INSTANCE = None,
    tier: opt.TIER = None,
    catalog: opt.CATALOG = None,
    engine: opt.ENGINE = "vllm",
    precision: opt.PRECISION = None,
    kv_cache_dtype: opt.KV = None,
    tensor_parallel: opt.TP = None,
    pipeline_parallel: opt.PP = None,
    data_parallel: opt.DP = None,
    max_model_len: opt.MAX_LEN = None,
    max_num_seqs: opt.MAX_SEQS = None,
    json: opt.JSON = False,
) -> int:
    """Predict one configuration: memory, latency, throughput, cost. Axes left open take their best value.

    Example: planner estimate --model 70b --on 4xa100-sxm-80 --tp 4 --precision bf16 --concurrency 16
    """
    from planner.api import estimate as estimate_request
    from planner.report import console

    given = dict(locals())
    need_hardware(given)
    result = estimate_request(opt.make_request(given))
    console.show_estimate(result, json=json)
    return 0 if result.fits else EXIT_NO_PLAN


def memory(
    model: opt.MODEL,
    input_tokens: opt.INPUT = "1024",
    output_tokens: opt.OUTPUT = "256",
    on: opt.ON = None,
    gpu: opt.GPU = None,
    instance: opt.INSTANCE = None,
    catalog: opt.CATALOG = None,
    engine: opt.ENGINE = "vllm",
    precision: opt.PRECISION = None,
    kv_cache_dtype: opt.KV = None,
    tensor_parallel: opt.TP = None,
    pipeline_parallel: opt.PP = None,
    max_model_len: opt.MAX_LEN = None,
    max_num_seqs: opt.MAX_SEQS = None,
    json: opt.JSON = False,
) -> int:
    """The memory of one configuration, part by part, and how many sequences it holds.

    Example: planner memory --model 70b --gpu h100-sxm --tp 4 --precision fp8 --max-num-seqs 64
    """
    from planner.api import memory as memory_request
    from planner.report import console

    given = dict(locals())
    if gpu is not None and len(gpu) > 1:
        raise InvalidValueError("memory looks at one GPU", f"--gpu was given {len(gpu)} times", "Give --gpu once.")
    if gpu is not None and on is None and instance is None:
        degree = (opt.whole(tensor_parallel, "--tensor-parallel") or 1) * (
            opt.whole(pipeline_parallel, "--pipeline-parallel") or 1
        )
        given["on"], given["gpu"] = f"{degree}x{gpu[0]}", None
    need_hardware(given)
    result = memory_request(opt.make_request(given))
    console.show_memory(result, json=json)
    return 0 if result.fits else EXIT_NO_PLAN


def need_hardware(given: dict[str, object]) -> None:
    """A single configuration needs to know its hardware."""
    if not any(given.get(k) for k in ("on", "gpu", "instance")):
        raise InvalidValueError(
            "on which hardware?",
            "no --on, --gpu or --instance was given",
            "Write for example --on 4xa100-sxm-80 or --gpu h100-sxm.",
        )

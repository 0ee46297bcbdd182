"""solve, compare, estimate, memory: parse the options, call the planner, hand the result to the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.cli import options as opt
from planner.cli.options import Given, Group
from planner.cli.train import TRAIN, train_request
from planner.errors import EXIT_NO_PLAN, InvalidValueError
from planner.request import ServeRequest, TrainRequest

TASKS = ("serve", "train")
SERVE_ONLY: Group = {
    **opt.LOAD,
    **{k: opt.LIMITS[k] for k in ("latency", "tpot", "e2e", "min_throughput", "max_accuracy_loss")},
    **{
        k: opt.PINS[k]
        for k in ("engine", "attention_data_parallel", "kv_cache_dtype", "max_model_len", "max_num_seqs", "unpublished")
    },
}
ONE_ENGINE: Group = {**opt.PINS, "engine": opt._text("The engine (default vllm).", "--engine")}
LENGTHS: Group = {k: opt.LOAD[k] for k in ("input_tokens", "output_tokens")}
OUTPUT: Group = {
    "time_limit": opt._text("Most time for the proof.", "--time-limit", default="30s"),
    "out": (
        Annotated[str | None, typer.Option("--out", "-o", help="Folder for plan.yaml and the launch files.")],
        None,
    ),
    "validate": opt._text(
        "dry: count the answer's real model on fake tensors; an answer that does not fit gives way to the next best.",
        "--validate",
    ),
    "force": opt._flag("Overwrite files in --out that planner did not write.", "--force"),
}
CALIBRATION: Group = {
    "calibration": opt._many(
        "Validated plan whose measurements correct predictions of the same GPU and engine (repeatable).",
        "--calibration",
    ),
}
TABLE: Group = {
    "top": (
        Annotated[
            int | None, typer.Option("--top", help="Show so many rows (0 = all; default 20 in a table, else all).")
        ],
        None,
    ),
    "near_misses": opt._flag("Also show types that break exactly one limit.", "--near-misses"),
    "format": opt._text("table, json, csv or markdown.", "--format", default="table"),
}


def request_of(o: Given) -> ServeRequest | TrainRequest:
    """The request of the task; options of the other task are refused."""
    if opt.one_of(o.get("task") or "serve", TASKS, "task") == "train":
        opt.refuse(o, SERVE_ONLY, "serve")
        return train_request(o)
    opt.refuse(o, TRAIN, "train")
    return opt.serve_request(o)


@opt.command(opt.MODEL, opt.GOAL, opt.LOAD, opt.LIMITS, opt.HARDWARE, opt.PINS, TRAIN, CALIBRATION, OUTPUT, opt.JSON)
def solve(o: Given) -> int:
    """Find the best deployment or training run, prove it, and write the files that launch it.

    Example: planner solve --model 70b --goal cheapest --latency 200ms --out plan/

    Example: planner solve --task train --model llama-3.1-8b --tokens 1B --seq-len 8192 --deadline 24h
    """
    from planner.api import solve as solve_request
    from planner.report import console

    request: Any = replace(request_of(o), time_limit_s=opt.duration(o["time_limit"], "--time-limit") or 30.0)
    if o["out"] == "":
        raise InvalidValueError("--out is empty", "", "Name a folder, for example --out plan/.")
    files = calibration_files(o)
    if o["validate"] is None:
        plan = solve_request(request, calibration=files)
    else:
        opt.one_of(o["validate"], ("dry",), "level of --validate")
        plan = _checked(request, files)
    written: list[Path] = []
    if o["out"] is not None and plan.deployment is not None:
        from planner.emit import write_files

        written = write_files(plan, Path(o["out"]), force=o["force"])
    console.show_plan(plan, json=o["json"], written=written)
    return EXIT_NO_PLAN if plan.status == "infeasible" else 0


def _checked(request: Any, calibration: tuple[str, ...]) -> Any:
    """The best answer that the dry run accepts, with its validation."""
    from planner.api import solve as solve_request
    from planner.report.progress import progress
    from planner.validate.checked import checked

    with progress() as tell:
        return checked(lambda excluded: solve_request(request, excluded=excluded, calibration=calibration), tell)


@opt.command(opt.MODEL, opt.GOAL, opt.LOAD, opt.LIMITS, opt.HARDWARE, opt.PINS, TRAIN, CALIBRATION, TABLE, opt.JSON)
def compare(o: Given) -> int:
    """Every instance type that can do it, best configuration each, sorted by the goal.

    Example: planner compare --model 8b --rate 5 --provider aws --format markdown
    """
    from planner.api import compare as compare_request
    from planner.estimator.corrections import CORRECTED
    from planner.report import console

    if o["json"] and o["format"] not in ("table", "json"):
        raise InvalidValueError(
            f"--json and --format {o['format']} exclude each other", "one table is printed", "Drop one of them."
        )
    shape = "json" if o["json"] else opt.one_of(o["format"], ("table", "json", "csv", "markdown"), "format")
    top = o["top"] if o["top"] is not None else 20 if shape == "table" else 0
    if top < 0:
        raise InvalidValueError(f"--top must be 0 or more, not {top}", "", "Write for example --top 20.")
    choices = compare_request(request_of(o), near_misses=o["near_misses"], calibration=calibration_files(o))
    console.show_choices(choices if top == 0 else choices[:top], shape, total=len(choices))
    if o["calibration"] and not any(CORRECTED in c.note for c in choices):
        console.complain("the calibration files hold no engine and GPU of this table: nothing is corrected")
    return 0 if any(c.fits for c in choices) else EXIT_NO_PLAN


@opt.command(
    opt.MODEL,
    opt.GOAL,
    opt.LOAD,
    opt.HARDWARE,
    ONE_ENGINE,
    TRAIN,
    CALIBRATION,
    opt.JSON,
)
def estimate(o: Given) -> int:
    """Predict one configuration: memory, latency, throughput, cost. Axes left open take their best value.

    Example: planner estimate --model 70b --on 4xa100-sxm-80 --tp 4 --precision bf16 --concurrency 16
    """
    from planner.api import estimate as estimate_request
    from planner.report import console

    need_hardware(o)
    one_engine(o)
    result = estimate_request(request_of(o), calibration=calibration_files(o))
    console.show_estimate(result, json=o["json"])
    return 0 if result.fits else EXIT_NO_PLAN


@opt.command(
    opt.MODEL,
    opt.LOAD,
    opt.HARDWARE,
    ONE_ENGINE,
    TRAIN,
    opt.JSON,
)
def memory(o: Given) -> int:
    """The memory of one configuration, part by part, and how many sequences it holds.

    Example: planner memory --model 70b --gpu h100-sxm --tp 4 --precision fp8 --max-num-seqs 64
    """
    from planner.api import memory as memory_request
    from planner.report import console

    gpu = o["gpu"]
    if gpu and len(gpu) > 1:
        raise InvalidValueError("memory looks at one GPU", f"--gpu was given {len(gpu)} times", "Give --gpu once.")
    if gpu and not o["on"] and not o["instance"]:
        degrees = [opt.whole(o[k], f"--{k.replace('_', '-')}") or 1 for k in ("tensor_parallel", "pipeline_parallel")]
        o["on"], o["gpu"] = f"{degrees[0] * degrees[1]}x{gpu[0]}", None
    need_hardware(o)
    one_engine(o)
    if o["task"] == "train" and o["tokens"] is None and o["samples"] is None:
        o["tokens"] = "1B"
    result = memory_request(request_of(o))
    console.show_memory(result, json=o["json"])
    return 0 if result.fits else EXIT_NO_PLAN


def calibration_files(o: Given) -> tuple[str, ...]:
    """The files of --calibration."""
    files = tuple(o.get("calibration") or ())
    if any(not file for file in files):
        raise InvalidValueError(
            "--calibration is empty", "", "Name a validated plan, for example --calibration checked.yaml."
        )
    return files


def need_hardware(o: Given) -> None:
    """A single configuration needs to know its hardware."""
    if not any(o.get(k) for k in ("on", "gpu", "instance")):
        raise InvalidValueError(
            "on which hardware?",
            "no --on, --gpu or --instance was given",
            "Write for example --on 4xa100-sxm-80 or --gpu h100-sxm.",
        )


def one_engine(o: Given) -> None:
    """A single serving configuration runs on one engine: vLLM unless named."""
    if o["task"] == "serve" and o["engine"] is None:
        o["engine"] = "vllm"

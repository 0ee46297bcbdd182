"""`planner validate PLAN`: the plan's own numbers beside counted or measured ones. Each level is a function in LEVELS."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.cli import options as opt
from planner.cli.options import Given, Group
from planner.cli.validate_engine import ENGINE, engine_level
from planner.cli.writing import check_writable, write_plan
from planner.errors import InvalidValueError, PlanFileError, UnknownNameError

PATIENCE_S = 2.0

PLAN: Group = {
    "plan_file": (
        Annotated[
            Path, typer.Argument(metavar="PLAN", help="plan.yaml or plan.json, as written by `planner solve --out`.")
        ],
        inspect.Parameter.empty,
    ),
    "level": opt._text(
        "dry: count the real model on fake tensors, without hardware. device: time one rank's shard here. engine: start the emitted "
        "files and measure them.",
        "--level",
        default="dry",
    ),
    "out": (
        Annotated[
            str | None,
            typer.Option("--out", metavar="FILE", help="Write a copy of the plan with its validation (engine: default PLAN itself)."),
        ],
        None,
    ),
}  # fmt: skip


DEVICE: Group = {"profile": opt._text("device: file for a torch profiler trace (Chrome format).", "--profile")}


@opt.command(PLAN, DEVICE, ENGINE, opt.JSON)
def validate(o: Given) -> int:
    """Check a plan: predicted against counted or measured, part by part.

    dry builds the plan's transformers model from its config alone (no weights, no GPU, no network), runs one rank of the
    planned sharding on fake tensors and counts memory, FLOPs and messages. Parts that differ by more than 5% are named in a line of
    their own and in `beyond_tolerance`; the exit code is 0 all the same, since the check was done. It needs torch and transformers:
    pip install '.[profile]'.

    device runs a few layers of one rank's shard on the GPU at hand (or the CPU, where the plan is for one) and times them.

    engine starts the emitted files on this machine (or through a cluster's own tool), loads them as planned, says whether each limit
    held (exit code 3 when one did not), writes the measurement into the plan, and stops all that it started.
    """
    level = LEVELS.get(o["level"])
    if level is None:
        raise UnknownNameError("level of validation", o["level"], tuple(LEVELS))
    if o["out"] == "":
        raise InvalidValueError("--out is empty", "", "Name a file, for example --out checked.yaml.")
    if o["level"] != "engine":
        opt.refuse_for(o, ENGINE, "--level engine")
    if o["level"] != "device":
        opt.refuse_for(o, DEVICE, "--level device")
    return level(o)


def _dry(o: Given) -> int:
    from planner.engines.plan_facts import read_plan
    from planner.validate.dry import dry_run

    plan = read_plan(o["plan_file"])
    if o["out"] is not None:
        check_writable(Path(o["out"]))
    with _patience(f"planner: counting {plan.model.name} on fake tensors; a large model takes up to a minute"):
        try:
            found = dry_run(plan)
        except (ArithmeticError, RuntimeError, ValueError, LookupError, TypeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise PlanFileError(
                "the plan cannot be counted", f"it has a value that no run can have ({reason})", "Solve again."
            ) from error
    return _finish(plan, found, o)


def _device(o: Given) -> int:
    """Time the shard here, with progress on stderr."""
    from planner.engines.plan_facts import read_plan
    from planner.report.progress import progress
    from planner.validate.device import device_run

    plan = read_plan(o["plan_file"])
    if o["out"] is not None:
        check_writable(Path(o["out"]))
    trace = None if o["profile"] is None else Path(o["profile"])
    if trace is not None:
        if o["profile"] == "":
            raise InvalidValueError("--profile is empty", "", "Name a file, for example --profile trace.json.")
        check_writable(trace, "--profile")
    with progress() as tell:
        found = device_run(plan, trace, lambda stage, share: tell(stage, 100 * share, 100.0))
    return _finish(plan, found, o)


def _finish(plan: Any, found: Any, o: Given) -> int:
    """Write the validated plan where one is wanted, and print the parts."""
    from planner.plan_seal import edit_notes
    from planner.report.validation import print_validation
    from planner.validate.dry import TOLERANCE_PERCENT

    out = o["out"]
    if out is not None:
        write_plan(replace(plan, validation=found.validation()), Path(out))
    rows: list[dict[str, Any]] = [
        {"part": p.name, "unit": p.unit, "predicted": p.predicted, "counted": p.counted, "error_percent": p.error_percent,
         "judged": p.judged}
        for p in found.parts
    ]  # fmt: skip
    tree = {
        "level": o["level"],
        **(
            {"tolerance_percent": TOLERANCE_PERCENT, "beyond_tolerance": list(found.beyond)}
            if o["level"] == "dry"
            else {}
        ),
        "parts": rows,
        "peak_gib": found.peak_parts_gib,
        "notes": [*found.notes, *edit_notes(plan)],
    }
    print_validation(plan.model.name, tree, str(out) if out else None, json=o["json"])
    return 0


LEVELS: dict[str, Callable[[Given], int]] = {"dry": _dry, "device": _device, "engine": engine_level}


@contextmanager
def _patience(text: str) -> Iterator[None]:
    """One line on stderr when the work inside takes longer than PATIENCE_S."""
    import sys
    import threading

    timer = threading.Timer(PATIENCE_S, lambda: (sys.stderr.write(text + "\n"), sys.stderr.flush()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

"""`planner validate PLAN`: the plan's own numbers beside counted ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.errors import InvalidValueError, PlanFileError, UnknownNameError

LEVELS = ("dry",)
PATIENCE_S = 2.0


def validate(
    plan_file: Annotated[
        Path, typer.Argument(metavar="PLAN", help="plan.yaml or plan.json, as written by `planner solve --out`.")
    ],
    level: Annotated[
        str, typer.Option("--level", help="dry: count the real model on fake tensors, without hardware.")
    ] = "dry",
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Write a copy of the plan with its validation.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a plan: predicted against counted, part by part.

    dry builds the plan's transformers model from its config alone (no weights, no GPU, no network), runs one rank of the
    planned sharding on fake tensors and counts memory and FLOPs. It needs torch and transformers:
    pip install 'llm-hardware-planner[profile]'.
    """
    from planner.plan import load_plan
    from planner.report.validation import print_validation
    from planner.validate.dry import dry_run

    if level not in LEVELS:
        raise UnknownNameError("level of validation", level, LEVELS)
    if out == "":
        raise InvalidValueError("--out is empty", "", "Name a file, for example --out checked.yaml.")
    plan = load_plan(plan_file)
    with _patience(f"planner: counting {plan.model.name} on fake tensors; a large model takes up to a minute"):
        try:
            found = dry_run(plan)
        except (ArithmeticError, RuntimeError, ValueError, LookupError, TypeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise PlanFileError(
                "the plan cannot be counted", f"it has a value that no run can have ({reason})", "Solve again."
            ) from error
    if out is not None:
        _write(replace(plan, validation=found.validation()), Path(out))
    rows: list[dict[str, Any]] = [
        {"part": p.name, "unit": p.unit, "predicted": p.predicted, "counted": p.counted, "error_percent": p.error_percent,
         "judged": p.judged}
        for p in found.parts
    ]  # fmt: skip
    tree = {"level": level, "parts": rows, "peak_gib": found.peak_parts_gib, "notes": list(found.notes)}
    print_validation(plan.model.name, tree, str(out) if out else None, json=as_json)


def _write(plan: Any, out: Path) -> None:
    """The plan as YAML, or JSON by suffix; whole or not at all."""
    from planner.plan import plan_to_json, plan_to_yaml

    part = out.with_name(out.name + ".part")
    try:
        part.write_text(plan_to_json(plan) if out.suffix == ".json" else plan_to_yaml(plan), encoding="utf-8")
        part.replace(out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InvalidValueError(f"cannot write {str(out)!r}", error.strerror or "", "Give another --out.") from None


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

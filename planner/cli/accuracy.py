"""`planner accuracy`: measured rows in, predictions and their errors out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from planner.errors import InvalidValueError

File = Annotated[Path | None, typer.Option(metavar="FILE", help="CSV of measured rows.")]


def accuracy(
    memory: File = None,
    serving: File = None,
    training: File = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where memory.csv, serving.csv, training.csv go.")] = Path(
        "accuracy"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare predictions with measured rows.

    Reads CSV files of measurements (columns metric, value and what was run), predicts every row from its own columns,
    writes DIR/memory.csv, DIR/serving.csv, DIR/training.csv with predicted, low, high, error_percent, skipped and assumed, and
    prints rows, coverage, errors and bias per metric and class, and how good a choice among measured alternatives would have been.
    Example: planner accuracy --memory memory_measured.csv --out accuracy
    """
    from planner.report.accuracy import print_scores, print_scores_json
    from planner.validate.accuracy import reasons, run

    given = {"memory": memory, "serving": serving, "training": training}
    files = {task: path for task, path in given.items() if path is not None}
    if not files:
        raise InvalidValueError(
            "nothing to compare", "no file was given", "Give --memory, --serving or --training FILE."
        )
    results = {}
    for task, path in files.items():
        found = run(task, path, out)
        facts = [{**asdict(s), "coverage": s.coverage} for s in found.scores]
        results[task] = (facts, [asdict(c) for c in found.choices], reasons(found.written), str(out / f"{task}.csv"))
    if as_json:
        print_scores_json({**results})
        return
    for task, (facts, choices, why, where) in results.items():
        print_scores(task, facts, choices, (why, where))

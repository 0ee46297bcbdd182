"""Printing of accuracy scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from planner.validate.accuracy import Score


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}%" if abs(value) < 10 else f"{value:.1f}%"


def print_scores(task: str, scores: Sequence[Score], reasons: Sequence[tuple[str, int]], where: str) -> None:
    """One table a task: metric, class, rows, coverage, errors, and the reasons for what was left out."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{task}: predicted against measured", title_justify="left")
    for name in ("metric", "class"):
        table.add_column(name, overflow="fold")
    for name in ("rows", "coverage", "median APE", "p95 APE", "mean APE", "bias", "in range"):
        table.add_column(name, justify="right")
    for s in scores:
        if not s.predicted:
            continue
        inside = "-" if s.inside is None else f"{s.inside:.0%}"
        errors = (_percent(s.median_ape), _percent(s.p95_ape), _percent(s.mean_ape), _percent(s.bias))
        table.add_row(s.metric, s.group, str(s.rows), f"{s.coverage:.0%}", *errors, inside)
    console = Console()
    console.print(table)
    alone = [s for s in scores if not s.predicted and s.group != "all"]
    if alone:
        console.print(
            f"  no prediction for {sum(s.rows for s in alone)} rows of {len({s.metric for s in alone})} metrics",
            markup=False,
        )
    for reason, count in reasons[:20]:
        console.print(f"  skipped {count}: {reason}", highlight=False, markup=False)
    if len(reasons) > 20:
        console.print(f"  and {len(reasons) - 20} more reasons, see {where}", highlight=False, markup=False)
    console.print(f"  every row: {where}", highlight=False, markup=False)


def print_scores_json(results: dict[str, tuple[Sequence[Score], Sequence[tuple[str, int]], str]]) -> None:
    """The same as one JSON object by task."""
    found = {
        task: {
            "scores": [{**asdict(s), "coverage": s.coverage} for s in scores],
            "skipped": [{"reason": r, "rows": n} for r, n in why],
            "file": where,
        }
        for task, (scores, why, where) in results.items()
    }
    print(json.dumps(found, indent=2))

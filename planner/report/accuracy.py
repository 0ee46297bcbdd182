"""Printing of accuracy scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Score = dict[str, Any]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}%" if abs(value) < 10 else f"{value:.1f}%"


def print_scores(task: str, scores: Sequence[Score], reasons: Sequence[tuple[str, int]], where: str) -> None:
    """A block of lines a metric: class, rows, coverage, errors; then the reasons for what was left out."""
    print(f"{task}: predicted against measured (APE = absolute percentage error)")
    print(f"{'':36}{'rows':>5}{'cover':>6}{'median':>8}{'p95':>8}{'mean':>8}{'bias':>8}{'in range':>9}")
    metric = ""
    for s in scores:
        if not s["predicted"]:
            continue
        if s["metric"] != metric:
            metric = s["metric"]
            print(metric)
        inside = "-" if s["inside"] is None else f"{s['inside']:.0%}"
        errors = "".join(f"{_percent(s[name]):>8}" for name in ("median_ape", "p95_ape", "mean_ape", "bias"))
        name = s["group"] if len(s["group"]) <= 33 else s["group"][:30] + "..."
        print(f"  {name:<34}{s['rows']:>5}{s['coverage']:>6.0%}{errors}{inside:>9}")
    alone = [s for s in scores if not s["predicted"] and s["group"] != "all"]
    if alone:
        print(f"no prediction for {sum(s['rows'] for s in alone)} rows of {len({s['metric'] for s in alone})} metrics")
    for reason, count in reasons[:20]:
        print(f"skipped {count}: {reason}")
    if len(reasons) > 20:
        print(f"and {len(reasons) - 20} more reasons")
    print(f"every row: {where}")


def print_scores_json(results: dict[str, tuple[Sequence[Score], Sequence[tuple[str, int]], str]]) -> None:
    """The same as one JSON object by task."""
    found = {
        task: {"scores": list(scores), "skipped": [{"reason": r, "rows": n} for r, n in why], "file": where}
        for task, (scores, why, where) in results.items()
    }
    print(json.dumps(found, indent=2))

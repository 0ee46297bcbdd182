"""Printing of accuracy scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Score = dict[str, Any]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}%" if abs(value) < 10 else f"{value:.1f}%"


def print_scores(
    task: str, scores: Sequence[Score], choices: Sequence[Score], rest: tuple[Sequence[tuple[str, int]], str]
) -> None:
    """A block of lines a metric: class, rows, coverage, errors; choices among alternatives; the reasons for what was left out."""
    reasons, where = rest
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
    _print_choices(choices)
    alone = [s for s in scores if not s["predicted"] and s["group"] != "all"]
    if alone:
        print(f"no prediction for {sum(s['rows'] for s in alone)} rows of {len({s['metric'] for s in alone})} metrics")
    for reason, count in reasons[:20]:
        print(f"skipped {count}: {reason}")
    if len(reasons) > 20:
        print(f"and {len(reasons) - 20} more reasons")
    print(f"every row: {where}")


def _print_choices(choices: Sequence[Score]) -> None:
    if not choices:
        return
    print("choice among measured alternatives (same model, GPUs, load and source): regret of the predicted best")
    print(f"{'':36}{'groups':>7}{'rows':>6}{'median':>8}{'mean':>8}{'worst':>8}{'best':>6}{'random':>8}{'rank':>6}")
    for c in choices:
        regret = "".join(f"{100 * c[name]:>7.1f}%" for name in ("median_regret", "mean_regret", "worst_regret"))
        rank = "-" if c["rank_correlation"] is None else f"{c['rank_correlation']:.2f}"
        chance = f"{100 * c['random_regret']:>7.1f}%"
        print(f"  {c['metric']:<34}{c['groups']:>7}{c['rows']:>6}{regret}{c['best_picked']:>6.0%}{chance}{rank:>6}")


def print_scores_json(
    results: dict[str, tuple[Sequence[Score], Sequence[Score], Sequence[tuple[str, int]], str]],
) -> None:
    """The same as one JSON object by task."""
    found = {
        task: {
            "scores": list(scores),
            "choices": list(choices),
            "skipped": [{"reason": r, "rows": n} for r, n in why],
            "file": where,
        }
        for task, (scores, choices, why, where) in results.items()
    }
    print(json.dumps(found, indent=2))

"""Predicted against counted, for the console."""

from __future__ import annotations

from typing import Any

from planner.report.console import say, say_json, wrapped


def print_validation(model: str, tree: dict[str, Any], written: str | None, *, json: bool) -> None:
    """The parts of a validation with their differences, then what was counted in words."""
    if json:
        say_json(tree)
        return
    word = "counted" if tree["level"] == "dry" else "measured"
    say(f"{model}, level {tree['level']}: predicted against {word}")
    say(f"  {'':<24}{'predicted':>12}{word:>12}  {'unit':<8}{'difference':>10}")
    for row in tree["parts"]:
        error = row["error_percent"]
        shown = "-" if error is None else f"{error:+.1f}%"
        mark = "" if row["judged"] else "  (shown, not judged)"
        say(f"  {row['part']:<24}{row['predicted']:>12,.2f}{row['counted']:>12,.2f}  {row['unit']:<8}{shown:>10}{mark}")
    if tree.get("beyond_tolerance"):
        names = ", ".join(tree["beyond_tolerance"])
        say(wrapped(f"DIFFERS by more than {tree['tolerance_percent']:g}%: {names}. Trust the count where they part."))
    elif "tolerance_percent" in tree:
        say(f"All within {tree['tolerance_percent']:g}%.")
    if tree["peak_gib"]:
        kinds = (f"{k.lower().replace('_', ' ')} {v:.2f}" for k, v in tree["peak_gib"].items() if v >= 0.005)
        say(wrapped(f"Counted peak by kind, GiB: {', '.join(kinds)}."))
    for note in tree["notes"]:
        say(wrapped(note))
    if written:
        say(f"Wrote {written}")


def engine_tree(found: Any) -> dict[str, Any]:
    """An engine run as a tree for --json."""
    rows = [
        {"name": r.name, "unit": r.unit, "predicted": r.predicted, "low": r.low, "high": r.high, "measured": r.measured,
         "error_percent": r.error_percent, "inside": r.inside, "no_interval": r.no_range}
        for r in found.rows
    ]  # fmt: skip
    verdicts = [
        {"limit": v.limit, "allowed": v.allowed, "measured": v.measured, "verdict": v.verdict, "why": v.why}
        for v in found.verdicts
    ]
    return {
        "level": "engine",
        "comparable": found.comparable,
        "rows": rows,
        "limits": verdicts,
        "validation": found.validation(),
        "notes": list(found.notes),
    }


def print_engine(plan: Any, tree: dict[str, Any], written: str | None, *, json: bool) -> None:
    """Predicted against measured with its range, then a verdict per limit of the request."""
    if json:
        say_json(tree)
        return
    say(f"{plan.model.name}, level engine: predicted against measured")
    if tree["rows"]:
        say(f"  {'':<26}{'predicted':>12}{'80% interval':>24}{'measured':>12}  {'unit':<9}{'difference':>10}")
    for row in tree["rows"]:
        span = "" if row["low"] is None else f"{_short(row['low'])} .. {_short(row['high'])}"
        error = "-" if row["error_percent"] is None or not tree["comparable"] else f"{row['error_percent']:+.1f}%"
        mark = "  outside" if row["inside"] is False and tree["comparable"] else ""
        say(
            f"  {row['name']:<26}{_short(row['predicted']):>12}{span:>24}{_short(row['measured']):>12}  "
            f"{row['unit']:<9}{error:>10}{mark}"
        )
    for why in dict.fromkeys(row["no_interval"] for row in tree["rows"] if row["low"] is None):
        names = ", ".join(row["name"] for row in tree["rows"] if row["low"] is None and row["no_interval"] == why)
        say(f"  {names}: no interval, {why}")
    others = {k: v for k, v in tree["validation"]["measured"].items() if k.endswith(("_p50", "_p95", "_p99"))}
    if others:
        say("  measured percentiles, ms:")
        for name in ("ttft", "tpot", "e2e"):
            values = [f"p{p} {_short(others[f'{name}_ms_p{p}'])}" for p in (50, 95, 99) if f"{name}_ms_p{p}" in others]
            if values:
                say(f"    {name.upper():<6}{', '.join(values)}")
    if tree["limits"]:
        say("Limits of the request:")
    for v in tree["limits"]:
        say(f"  {v['limit']:<24}{v['allowed']:>12}{v['measured']:>14}  {v['verdict']:<13} ({v['why']})")
    for note in tree["notes"]:
        say(wrapped(note))
    if written:
        say(f"Wrote {written}")


def _short(value: float) -> str:
    """A figure with three or four digits that matter."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

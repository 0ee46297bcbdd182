"""Predicted against counted, for the console."""

from __future__ import annotations

from typing import Any

from planner.report.console import say, say_json, wrapped


def print_validation(model: str, tree: dict[str, Any], written: str | None, *, json: bool) -> None:
    """The parts of a validation with their differences, then what was counted in words."""
    if json:
        say_json(tree)
        return
    say(f"{model}, level {tree['level']}: predicted against counted")
    say(f"  {'':<24}{'predicted':>12}{'counted':>12}  {'unit':<8}{'difference':>10}")
    for row in tree["parts"]:
        error = row["error_percent"]
        shown = "-" if error is None else f"{error:+.1f}%"
        mark = "" if row["judged"] else "  (shown, not judged)"
        say(f"  {row['part']:<24}{row['predicted']:>12,.2f}{row['counted']:>12,.2f}  {row['unit']:<8}{shown:>10}{mark}")
    if tree["peak_gib"]:
        kinds = (f"{k.lower().replace('_', ' ')} {v:.2f}" for k, v in tree["peak_gib"].items() if v >= 0.005)
        say(wrapped(f"Counted peak by kind, GiB: {', '.join(kinds)}."))
    for note in tree["notes"]:
        say(wrapped(note))
    if written:
        say(f"Wrote {written}")

"""Numbers of a plan that was read back: none that no plan can hold."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from planner.errors import PlanFileError

MAY_BE_NEGATIVE = ("headroom_gib",)
MOST = {"count": 100_000, "gpus": 1_000_000, "gpus_per_instance": 10_000}
LARGEST = 1e18
WIDEST = 120
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 2  # YAML aliases nest without end
_BRIEF.maxstring = _BRIEF.maxother = WIDEST


def short(value: Any) -> str:
    """A value as an error message shows it: at most WIDEST characters, whatever it holds."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"a whole number of {value.bit_length()} bits"  # Python refuses to write the longest
    text = repr(value[:WIDEST]) if isinstance(value, str) else _BRIEF.repr(value)
    return cut(text)


def cut(text: str) -> str:
    """Text of at most WIDEST characters."""
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def numbers(tree: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a tree of dicts and lists, with its path."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from numbers(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for position, value in enumerate(tree):
            yield from numbers(value, f"{path}.{position}")
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield path, float(tree)


def check_numbers(tree: Mapping[str, Any]) -> None:
    """Raises PlanFileError for the first number of deployment, memory, predictions or cost that is not finite, negative, beyond any machine,
    or a range that does not hold its value."""
    parts = {name: tree.get(name) for name in ("deployment", "memory", "predicted", "cost")}
    for path, value in numbers(parts):
        name = path.rsplit(".", 1)[-1]
        most = MOST.get(name, LARGEST)
        if not math.isfinite(value) or value > most or (value < 0 and name not in MAY_BE_NEGATIVE):
            raise PlanFileError(
                f"{path} of the plan is {value:g}",
                f"it must be a number from 0 to {most:g}" if name not in MAY_BE_NEGATIVE else "it must be finite",
                "Solve again, or mend that field.",
            )
    for name, found in (parts["predicted"] or {}).items():
        low, value, high = found["low"], found["value"], found["high"]
        slack = 1e-6 * max(abs(value), 1e-6)
        if not low - slack <= value <= high + slack:
            raise PlanFileError(
                f"predicted.{name} of the plan is {value:g}, outside its own range {low:g} .. {high:g}",
                "",
                "Solve again, or mend that field.",
            )

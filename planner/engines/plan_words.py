"""How a value of a plan file that cannot be is said."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from planner.errors import PlanFileError, UnknownNameError

MEND = "Solve again, or mend that field."


def wrong(what: str, why: str, next_step: str = MEND) -> PlanFileError:
    """An error in the words of a plan file."""
    return PlanFileError(what, why, next_step)


def known(field: str, value: Any, names: Iterable[str]) -> None:
    """UnknownNameError, with the nearest names, for a value that is none of them."""
    if value not in (pool := tuple(names)):
        raise UnknownNameError(f"{field} of the plan", str(value), pool, MEND)

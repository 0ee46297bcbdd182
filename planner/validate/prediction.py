"""One predicted number beside a measured one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """A prediction with its 80% interval, in the unit of the measured row; or None and the reason it was skipped.

    assumed: what was assumed in place of facts that the row does not state.
    """

    predicted: float | None
    low: float | None
    high: float | None
    skipped: str = ""
    assumed: str = ""

"""Rows of a file of measurements."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from planner.errors import InvalidValueError

Row = dict[str, str]
_MAX_ROWS = 1_000_000


def read_rows(path: Path) -> list[Row]:
    """Rows of a CSV file; InvalidValueError in one line when it is none."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = list(csv.DictReader(stream, strict=True))
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be read", error.strerror or "", "Check the path.") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidValueError(
            f"{path} is not a CSV file", str(error)[:80], "Give a file with a header line."
        ) from None
    if not rows or len(rows) > _MAX_ROWS:
        raise InvalidValueError(f"{path} has {len(rows)} rows", f"1 to {_MAX_ROWS} are read", "Check the file.")
    lacking = [c for c in ("metric", "value") if c not in rows[0]]
    if lacking:
        raise InvalidValueError(f"{path} has no column {', '.join(lacking)}", "", "See docs for the columns.")
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise InvalidValueError(f"{path} line {number} has not as many fields as the header", "", "Mend the line.")
    return rows


def measured(row: Row) -> float | None:
    """The measured number of a row; None when it holds a word (an outcome)."""
    try:
        value = float(row["value"])
    except ValueError:
        return None
    return value if math.isfinite(value) else None

"""Today's date, and the one way to fix it: SOURCE_DATE_EPOCH (seconds since 1970), the convention of reproducible builds."""

from __future__ import annotations

import datetime as dt
import os

from planner.errors import InvalidValueError


def today() -> dt.date:
    """The date against which the age of prices is counted. SOURCE_DATE_EPOCH makes plans reproducible."""
    fixed = os.environ.get("SOURCE_DATE_EPOCH")
    if fixed is None:
        return dt.datetime.now(dt.UTC).date()
    try:
        return dt.datetime.fromtimestamp(int(fixed), dt.UTC).date()
    except (ValueError, OverflowError, OSError):
        raise InvalidValueError(
            f"SOURCE_DATE_EPOCH {fixed!r} is not a number of seconds", "", "Unset it, or set it with: date +%s"
        ) from None

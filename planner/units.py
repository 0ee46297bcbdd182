"""Units: GB = 1e9 bytes, GiB = 2**30 bytes, never mixed. Parsing of what people type, with the unit demanded."""

from __future__ import annotations

import math
import re

from planner.errors import InvalidValueError

KIB, MIB, GIB = 2**10, 2**20, 2**30
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
TERA = 1e12
HOURS_PER_MONTH = 730.0

_NUMBER = re.compile(
    r"^\s*([+-]?(?:(?:\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*)\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-zA-Z/%$]*)\s*$", re.I
)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_COUNT = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_MONEY = {
    "/h": 1.0,
    "/hr": 1.0,
    "/hour": 1.0,
    "/d": 1 / 24,
    "/day": 1 / 24,
    "/mo": 1 / HOURS_PER_MONTH,
    "/month": 1 / HOURS_PER_MONTH,
}


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _NUMBER.match(text)
    if not match:
        raise InvalidValueError(f"{what} {text!r} is not a number with a unit", "", f"Write for example {example}.")
    return float(match[1].replace("_", "").replace(",", "")), match[2].lower()


def _positive(value: float, text: str, what: str, example: str, must: str = "a positive, finite number") -> float:
    if not math.isfinite(value) or value <= 0:
        raise InvalidValueError(f"{what} {text!r} must be {must}", "", f"Write for example {example}.")
    return value


def parse_duration_s(text: str, what: str = "duration") -> float:
    """Seconds from '200ms', '1.5s', '24h'. A bare number is refused: 200 of what?"""
    value, unit = _split(text, what, "200ms or 1.5s")
    if unit not in _SECONDS:
        raise InvalidValueError(
            f"{what} {text!r} has no known time unit",
            f"units are {', '.join(_SECONDS)}",
            "Write for example 200ms or 1.5s.",
        )
    return _positive(value * _SECONDS[unit], text, what, "200ms or 1.5s")


def parse_count(
    text: str, what: str = "count", *, must: str = "a positive, finite number", example: str = "1024 or 1B"
) -> float:
    """A count with an optional suffix: '1024', '32k', '1B'. must, example: words of the error for one below what is possible."""
    value, unit = _split(text, what, example)
    if unit not in _COUNT:
        raise InvalidValueError(
            f"{what} {text!r} has no known suffix", "suffixes are k, M, B, T", f"Write for example {example}."
        )
    return _positive(value * _COUNT[unit], text, what, example, must)


def parse_usd_per_hour(text: str, what: str = "budget") -> float:
    """USD per hour from '20/h', '$20/h', '500/day', '10000/month'. A bare number is refused: per what?"""
    value, unit = _split(text.strip().lstrip("$"), what, "20/h")
    if unit not in _MONEY:
        raise InvalidValueError(
            f"{what} {text!r} has no period", "periods are /h, /day, /month", "Write for example 20/h."
        )
    return _positive(value * _MONEY[unit], text, what, "20/h")


def format_duration(seconds: float) -> str:
    """A duration as a person reads it: 187 ms, 4.21 s, 3.2 h."""
    if not math.isfinite(seconds):
        return "unbounded"
    if seconds < 1.0:
        return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def format_against(seconds: float, limit_s: float) -> str:
    """`value against limit`, the value with more digits where rounding would make the two look equal: 200.31 ms against 200 ms."""
    value, limit = format_duration(seconds), format_duration(limit_s)
    if value == limit and seconds != limit_s:
        value = f"{seconds * 1e3:.2f} ms" if seconds < 1.0 else f"{seconds:.4f} s"
    return f"{value} against {limit}"

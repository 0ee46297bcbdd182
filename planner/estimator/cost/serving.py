"""What serving costs."""

from __future__ import annotations

MILLION = 1e6
SECONDS_PER_HOUR = 3600.0


def usd_per_million_output_tokens(usd_per_hour: float, output_tokens_per_s: float) -> float | None:
    """usd_per_hour / (output_tokens_per_s * 3600) * 1e6, at the planned load; None when nothing is produced or it is free."""
    if output_tokens_per_s <= 0 or usd_per_hour <= 0:
        return None
    return usd_per_hour / (output_tokens_per_s * SECONDS_PER_HOUR) * MILLION

"""The validation of a plan in a few lines, for whoever shows a plan."""

from __future__ import annotations

from typing import Any

SHOWN = 6


def validation_lines(validation: dict[str, Any]) -> list[str]:
    """Level, differences between predicted and measured, and the verdict on each limit."""
    level = validation.get("level", "?")
    errors = [f"{name} {float(value):+.1f}%" for name, value in dict(validation.get("error_percent") or {}).items()]
    how = "counted on fake tensors" if level == "dry" else f"measured (level {level})"
    lines = [
        f"{how}; predicted over {'counted' if level == 'dry' else 'measured'}: {', '.join(errors[:SHOWN]) or 'not compared'}"
    ]
    if validation.get("hardware") == "not the planned one":
        lines[0] = f"{how}, but not on the planned hardware"
    for name, row in dict(validation.get("limits") or {}).items():
        lines.append(f"{name}: {row['verdict']} (allowed {row['allowed']}, measured {row['measured']})")
    return lines

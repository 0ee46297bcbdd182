"""Lengths of requests from a trace: CSV with a header, or JSON lines. Names as in the Azure and Mooncake traces, or our own."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from planner.errors import InvalidValueError

INPUT = ("input_tokens", "ContextTokens", "input_length", "prompt_tokens")
OUTPUT = ("output_tokens", "GeneratedTokens", "output_length", "completion_tokens")
MOST_ROWS = 1_000_000
EXAMPLE = "Give a CSV with the columns input_tokens,output_tokens."


def read_trace(path: Path, longest: int) -> tuple[tuple[int, int], ...]:
    """(prompt, answer) tokens of each row. Rows longer than `longest` tokens cannot be served and are an error that counts them."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lengths = [_lengths(row, number) for number, row in enumerate(_rows(file, path), 1)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InvalidValueError(f"cannot read the trace {str(path)!r}", str(reason), EXAMPLE) from None
    if not lengths:
        raise InvalidValueError(f"the trace {str(path)!r} has no rows", "", EXAMPLE)
    over = sum(i + o > longest for i, o in lengths)
    if over:
        raise InvalidValueError(
            f"{over} of {len(lengths)} rows of the trace are longer than the planned {longest} tokens", "the engine would refuse them",
            "Plan with a larger --max-model-len, or leave them out.",
        )  # fmt: skip
    return tuple(lengths)


def _rows(file: Iterable[str], path: Path) -> Iterator[dict[str, Any]]:
    lines = iter(file)
    if path.suffix not in (".jsonl", ".json"):
        yield from csv.DictReader(lines)
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            tree = json.loads(line)
        except (ValueError, RecursionError):
            tree = None
        if not isinstance(tree, dict) or number > MOST_ROWS:
            raise InvalidValueError(f"line {number} of the trace is no JSON object", "", EXAMPLE)
        yield tree


def _lengths(row: dict[str, Any], number: int) -> tuple[int, int]:
    values = []
    for names in (INPUT, OUTPUT):
        name = next((n for n in names if n in row), None)
        if name is None:
            raise InvalidValueError(
                f"row {number} of the trace has none of {', '.join(names)}", f"it has {', '.join(map(str, row))[:120]}", EXAMPLE
            )  # fmt: skip
        try:
            value = float(row[name])
        except (TypeError, ValueError):
            value = 0.0
        if not 1 <= value <= 10**8:
            raise InvalidValueError(f"row {number} of the trace: {name} is {row[name]!r}", "", EXAMPLE)
        values.append(int(value))
    return values[0], values[1]

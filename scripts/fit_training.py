"""Fit constants of engines/training.yaml on half of the published measurements; print them and both halves' error.

Usage: python scripts/fit_training.py FILE.csv STACK [metrics=a,b] name=low:high ...
Coordinate descent on mean and median of the absolute log error.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable

import numpy as np

from planner.engines.training import stacks
from planner.validate.accuracy_training import replay, replay_memory_training
from planner.validate.training_cases import half_of, read_case, tables

STEPS = (0.6, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.6)


def rows_of(path: str, stack: str, metrics: set[str]) -> list[dict[str, str]]:
    """Rows of the file that the stack answers for."""
    from planner.hardware.catalog import load_catalog

    catalog, found = load_catalog(), []
    with open(path, encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["metric"] not in metrics:
                continue
            if "gpu_mem_util" in row:
                found.append(row)
                continue
            try:
                if read_case(row, catalog).framework.name == stack:
                    found.append(row)
            except Exception:
                continue
    return found


def errors(rows: list[dict[str, str]], run: Callable[[list[dict[str, str]]], list]) -> tuple[np.ndarray, np.ndarray]:
    """Log ratio of prediction and measurement, and the half of each row that has one."""
    pairs = [
        (math.log(p.predicted / float(r["value"].strip("]"))), half_of(r))
        for r, p in zip(rows, run(rows), strict=True)
        if p.predicted
    ]
    return np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])


def fit(
    stack: str,
    bounds: dict[str, tuple[float, float]],
    rows: list[dict[str, str]],
    run: Callable,
    *,
    rounds: int = 2,
    both: bool = False,
) -> None:
    """Coordinate descent on the fit half (both halves when `both`, for stacks with a single group)."""
    constants = stacks()[stack].constants

    def score() -> float:
        e, half = errors(rows, run)
        e = e if both or not (half == 0).any() else e[half == 0]
        return float(np.mean(np.minimum(abs(e), 0.7)) + 0.5 * np.median(abs(e)))

    best = score()
    for _ in range(rounds):
        for name, (low, high) in bounds.items():
            for step in STEPS:
                old = constants[name]
                constants[name] = min(max(old * step, low), high)
                value = score()
                if value < best - 1e-5:
                    best = value
                else:
                    constants[name] = old
    e, half = errors(rows, run)
    print(stack, {k: float(f"{constants[k]:.3g}") for k in bounds}, f"score {best:.4f}")
    for h in (0, 1):
        if (half == h).any():
            print(
                "  half",
                h,
                "rows",
                int((half == h).sum()),
                f"median APE {np.median(abs(np.expm1(e[half == h]))):.3f} bias {np.median(e[half == h]):.3f}",
            )


def main() -> None:
    """Command line."""
    path, stack, *rest = sys.argv[1:]
    metrics = {"step_time_s", "tokens_per_s_per_gpu"}
    if rest[0].startswith("metrics="):
        metrics = set(rest.pop(0)[8:].split(","))
    both = rest[0] == "both" and bool(rest.pop(0))
    bounds = {}
    for item in rest:
        name, _, span = item.partition("=")
        low, high = span.split(":")
        bounds[name] = (float(low), float(high))
    memory = "memory_measured" in path
    rows = rows_of(path, stack, metrics)
    if memory:
        where = tables()["memory_rows"]["stacks"]
        index = 0 if stack.endswith("_single") else 1
        kind = next(k for k, v in where.items() if v[index] == stack)
        rows = [
            r
            for r in rows
            if r["task"] == "train"
            and (("foak" in r["note"]) == (kind == "foak"))
            and (int(float(r["n_gpus"])) > 1) == (index == 1)
        ]
    fit(stack, bounds, rows, replay_memory_training if memory else replay, both=both)


if __name__ == "__main__":
    main()

"""Fit constants of engines/training.yaml on half of the published measurements; print them and both halves' error.

Usage: python scripts/fit_training.py FILE.csv STACK [metrics=a,b] name=low:high ...
       python scripts/fit_training.py --ranges TRAINING.csv MEMORY.csv
Coordinate descent on the mean absolute log error, clipped at 0.5, groups (model, GPU, precision) weighing as the root of their rows. --ranges: the `training` part of estimator/uncertainty.yaml, as wide
as it takes for a group (model, GPU, source) that is left out to find 80% of its rows inside, on the fitted half alone.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable

import numpy as np

from planner.engines.training import stacks
from planner.validate.accuracy_training import range_kind, replay, replay_memory_training
from planner.validate.training_cases import half_of, read_case, read_memory_case
from planner.validate.training_models import tables

WIDER = np.arange(1.0, 4.01, 0.05)
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


def errors(
    rows: list[dict[str, str]], run: Callable[[list[dict[str, str]]], list]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log ratio of prediction and measurement, the half and the group (model, GPU, precision) of each row that has one."""
    pairs = [
        (
            math.log(p.predicted / float(r["value"].strip("]"))),
            half_of(r),
            f"{r['model']} {r['gpu']} {r.get('precision', '')}",
        )
        for r, p in zip(rows, run(rows), strict=True)
        if p.predicted
    ]
    return np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs]), np.array([p[2] for p in pairs])


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
        e, half, group = errors(rows, run)
        chosen = np.full(len(e), True) if both or not (half == 0).any() else half == 0
        means = [
            (np.mean(np.minimum(abs(e[at]), 0.5)), at.sum() ** 0.5)
            for at in (chosen & (group == g) for g in np.unique(group[chosen]))
        ]
        return float(np.average([m for m, _ in means], weights=[w for _, w in means]))

    best = start = score()
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
    e, half, _ = errors(rows, run)
    print(stack, {k: float(f"{constants[k]:.3g}") for k in bounds}, f"score {start:.4f} -> {best:.4f}")
    for h in (0, 1):
        if (half == h).any():
            print(
                "  half",
                h,
                "rows",
                int((half == h).sum()),
                f"median APE {np.median(abs(np.expm1(e[half == h]))):.3f} bias {np.median(e[half == h]):.3f}",
            )


def residuals(training: str, memory: str) -> dict[str, dict[str, list[tuple[float, int]]]]:
    """ln(measured / predicted) and half of every predicted row, by kind of range and by group."""
    from planner.hardware.catalog import load_catalog

    catalog, found = load_catalog(), {}
    for path, read, run in ((training, read_case, replay), (memory, read_memory_case, replay_memory_training)):
        with open(path, encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for row, prediction in zip(rows, run(rows), strict=True):
            try:
                value = float(row["value"].strip("]"))
            except ValueError:
                continue
            if not prediction.predicted or value <= 0:
                continue
            group = f"{row['model']} {row['gpu']} {row['source'].split('@')[0]}"
            kinds = found.setdefault(range_kind(read(row, catalog)), {})
            kinds.setdefault(group, []).append((math.log(value / prediction.predicted), half_of(row)))
    return found


def span(groups: list[list[float]], wider: float) -> tuple[float, float]:
    """10th and 90th percentile of the residuals, each row weighted so that a group counts as the root of its rows, times `wider`."""
    values = np.concatenate([np.array(g) for g in groups])
    weights = np.concatenate([np.full(len(g), len(g) ** -0.5) for g in groups])
    order = np.argsort(values)
    share = (np.cumsum(weights[order]) - 0.5 * weights[order]) / weights.sum()
    low, high = np.interp([0.1, 0.9], share, values[order])
    return float(min(low, 0.0) * wider), float(max(high, 0.0) * wider)


def ranges(training: str, memory: str) -> None:
    """Prints the range of each kind and the share of rows of both halves that it holds."""
    for kind, groups in sorted(residuals(training, memory).items()):
        fitted = [[e for e, half in rows if half == 0] for rows in groups.values()]
        fitted = [g for g in fitted if g]
        chosen = WIDER[-1]
        for wider in WIDER:
            held = 0
            for i, left in enumerate(fitted):
                low, high = span(fitted[:i] + fitted[i + 1 :] or fitted, wider)
                held += sum(low <= e <= high for e in left)
            if held >= 0.8 * sum(map(len, fitted)):
                chosen = wider
                break
        low, high = (math.exp(v) for v in span(fitted, chosen))
        shares = [
            [low <= math.exp(e) <= high for rows in groups.values() for e, half in rows if half == h] for h in (0, 1)
        ]
        print(
            f"  {kind}: [{low:.2f}, {high:.2f}] # {len(fitted)} groups, wider {chosen:.2f}, inside",
            *(f"{np.mean(s):.0%} of {len(s)}" for s in shares if s),
        )


def main() -> None:
    """Command line."""
    if sys.argv[1] == "--ranges":
        ranges(*sys.argv[2:])
        return
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

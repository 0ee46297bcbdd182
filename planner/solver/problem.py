"""The problem in whole numbers, free of models and GPUs: what the solver, its explanations and its oracle share.

Latencies in microseconds, memory in KiB, money in micro-USD per hour, accuracy loss in millionths, token rates in
milli-tokens per second. Needs are rounded up, capacities down, so that a plan never breaks a limit by rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.request import Goal

IntArray = NDArray[np.int64]

LimitName = Literal[
    "vram", "host_ram", "ttft", "tpot", "e2e", "step_time", "deadline", "max_accuracy_loss",
    "budget", "budget_per_hour", "max_gpus", "quota", "min_throughput",
]  # fmt: skip
ROW_LIMITS: tuple[LimitName, ...] = (
    "vram",
    "host_ram",
    "ttft",
    "tpot",
    "e2e",
    "step_time",
    "deadline",
    "max_accuracy_loss",
)
GLOBAL_LIMITS: tuple[LimitName, ...] = ("budget", "budget_per_hour", "max_gpus", "quota", "min_throughput")
ALL_LIMITS: tuple[LimitName, ...] = ROW_LIMITS + GLOBAL_LIMITS

UNBOUNDED = 10**12
TIE_PERCENT = 1.0


@dataclass(frozen=True)
class Rows:
    """One configuration per row (equal-length integer arrays).

    hardware: index of its class. replicas .. replicas_max: allowed replicas (equal when fixed). replicas_per_node >= 1
    when replicas share a machine, else nodes_per_replica machines make one replica. duration_us: what `fastest`
    minimises (E2E of a request, or the whole run); duration_bucket: the same in steps of TIE_PERCENT, so that
    differences below the model's error are ties. metrics: what a row needs of each row limit. run_cost: micro-USD of
    the whole run, when cost is not an hourly rate (training); such rows have hardware of a single offer.
    """

    hardware: IntArray
    replicas: IntArray
    replicas_max: IntArray
    replicas_per_node: IntArray
    nodes_per_replica: IntArray
    gpus_per_replica: IntArray
    duration_us: IntArray
    duration_bucket: IntArray
    tokens_milli_per_s: IntArray
    metrics: Mapping[LimitName, IntArray]
    run_cost: IntArray | None = None

    def __len__(self) -> int:
        return len(self.hardware)

    def take(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> Rows:
        """The rows at the given positions."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("metrics", "run_cost")}
        return Rows(
            **{name: values[index] for name, values in arrays.items()},
            metrics={name: values[index] for name, values in self.metrics.items()},
            run_cost=None if self.run_cost is None else self.run_cost[index],
        )

    def machines(self, replicas: IntArray | None = None) -> IntArray:
        """Machines needed for so many replicas of each row (default: its own fewest)."""
        count = self.replicas if replicas is None else replicas
        shared = -(-count // np.maximum(self.replicas_per_node, 1))
        return np.where(self.replicas_per_node >= 1, shared, count * self.nodes_per_replica)


@dataclass(frozen=True)
class OfferColumn:
    """An offer as the solver sees it. place: machines of one answer come from one place (provider and region)."""

    hardware: int
    place: int
    micro_usd_per_hour: int
    gpus: int
    limit: int | None = None


@dataclass(frozen=True)
class Problem:
    """Rows, offers, the goal, and the limits in the units of the metrics (a limit that is absent does not exist).

    vram and host_ram are metrics of what is missing, so their limit is 0. budget: micro-USD (per hour, or of the run
    when rows have run_cost); budget_per_hour: micro-USD; min_throughput: milli-tokens per second.
    """

    goal: Goal
    rows: Rows
    offers: tuple[OfferColumn, ...]
    limits: Mapping[LimitName, int]

    def with_rows(self, rows: Rows) -> Problem:
        """The same problem over other rows."""
        return replace(self, rows=rows)


def excess(rows: Rows, limits: Mapping[LimitName, int]) -> dict[LimitName, IntArray]:
    """By how much each row breaks each row limit that exists (0 = keeps it)."""
    return {name: np.maximum(rows.metrics[name] - limits[name], 0) for name in ROW_LIMITS if name in limits}


def duration_bucket(duration_us: IntArray) -> IntArray:
    """A duration in logarithmic steps of TIE_PERCENT."""
    return np.asarray(np.floor(np.log(np.maximum(duration_us, 1)) / np.log1p(TIE_PERCENT / 100)), dtype=np.int64)


def prune_dominated(problem: Problem) -> tuple[IntArray, int]:
    """Positions of the rows that can be part of an answer to any loosening of the limits, and how many were dropped.

    Row a dominates b on the same class when it needs no more machines and GPUs, breaks no limit by more, is no slower,
    and gives no fewer tokens/s, with the same freedom in replicas. Equal rows keep the first.
    """
    rows = problem.rows
    metrics = [
        rows.machines(),
        rows.gpus_per_replica * rows.replicas,
        rows.duration_us,
        *excess(rows, problem.limits).values(),
    ]
    if rows.run_cost is not None:
        metrics.append(rows.run_cost)
    if problem.goal == "throughput" or "min_throughput" in problem.limits:
        metrics.append(-rows.tokens_milli_per_s * np.maximum(rows.replicas, 1))
    if problem.goal == "throughput":
        metrics += [-rows.replicas_per_node, rows.nodes_per_replica, -rows.replicas_max]
    table = np.stack(metrics, axis=1)
    kept: list[IntArray] = []
    for hardware in np.unique(rows.hardware):
        here = np.flatnonzero(rows.hardware == hardware)
        kept.append(here[_pareto(table[here])])
    keep = np.sort(np.concatenate(kept)) if kept else np.zeros(0, dtype=np.int64)
    return keep, len(rows) - len(keep)


def _pareto(points: IntArray) -> IntArray:
    """Positions of the points that no other point is at least as good as in every column (first of equals stays)."""
    order = np.lexsort(points.T[::-1])
    ranked = points[order]
    alive = np.ones(len(ranked), dtype=np.bool_)
    for i in range(len(ranked)):
        if not alive[i]:
            continue
        beaten = (ranked[i] <= ranked).all(axis=1)
        beaten[i] = False
        alive &= ~beaten
    return np.sort(order[alive])

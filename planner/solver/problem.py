"""The problem in whole numbers, free of models and GPUs: what the solver, its explanations and its oracle share.

Latencies in microseconds, memory in KiB, money in micro-USD per hour, accuracy loss in millionths, token rates in
milli-tokens per second. Needs are rounded up, capacities down, so that a plan never breaks a limit by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.request import Goal

IntArray = NDArray[np.int64]

LimitName = Literal["vram", "ttft", "tpot", "e2e", "max_accuracy_loss", "budget", "max_gpus", "quota", "min_throughput"]
ROW_LIMITS: tuple[LimitName, ...] = ("vram", "ttft", "tpot", "e2e", "max_accuracy_loss")
GLOBAL_LIMITS: tuple[LimitName, ...] = ("budget", "max_gpus", "quota", "min_throughput")
ALL_LIMITS: tuple[LimitName, ...] = ROW_LIMITS + GLOBAL_LIMITS

UNBOUNDED = 10**12
TIE_PERCENT = 1.0


@dataclass(frozen=True)
class Rows:
    """One configuration per row (equal-length integer arrays).

    hardware: index of its class. replicas .. replicas_max: allowed replicas (equal when fixed). replicas_per_node >= 1
    when replicas share a machine, else nodes_per_replica > 1 machines make one replica. latency_bucket: E2E in steps of
    TIE_PERCENT, so that differences below the model's error are ties.
    """

    hardware: IntArray
    replicas: IntArray
    replicas_max: IntArray
    replicas_per_node: IntArray
    nodes_per_replica: IntArray
    gpus_per_replica: IntArray
    required_kib: IntArray
    capacity_kib: IntArray
    ttft_us: IntArray
    tpot_us: IntArray
    e2e_us: IntArray
    latency_bucket: IntArray
    accuracy_loss_ppm: IntArray
    tokens_milli_per_s: IntArray

    def __len__(self) -> int:
        return len(self.hardware)

    def take(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> Rows:
        """The rows at the given positions."""
        return Rows(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

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
class LimitValues:
    """The limits in the units of Rows; None = no limit. VRAM and quotas are always there: they are facts."""

    ttft_us: int | None = None
    tpot_us: int | None = None
    e2e_us: int | None = None
    accuracy_loss_ppm: int | None = None
    budget_micro_usd_per_hour: int | None = None
    max_gpus: int | None = None
    min_tokens_milli_per_s: int | None = None


@dataclass(frozen=True)
class Problem:
    """Rows, offers, limits and the goal."""

    goal: Goal
    rows: Rows
    offers: tuple[OfferColumn, ...]
    limits: LimitValues

    def with_rows(self, rows: Rows) -> Problem:
        """The same problem over other rows."""
        return replace(self, rows=rows)


def excess(rows: Rows, limits: LimitValues) -> dict[LimitName, IntArray]:
    """By how much each row breaks each row limit (0 = keeps it)."""

    def over(value: IntArray, limit: int | None) -> IntArray:
        return np.zeros(len(rows), dtype=np.int64) if limit is None else np.maximum(value - limit, 0)

    return {
        "vram": np.maximum(rows.required_kib - rows.capacity_kib, 0),
        "ttft": over(rows.ttft_us, limits.ttft_us),
        "tpot": over(rows.tpot_us, limits.tpot_us),
        "e2e": over(rows.e2e_us, limits.e2e_us),
        "max_accuracy_loss": over(rows.accuracy_loss_ppm, limits.accuracy_loss_ppm),
    }


def latency_bucket(e2e_us: IntArray) -> IntArray:
    """E2E in logarithmic steps of TIE_PERCENT."""
    return np.floor(np.log(np.maximum(e2e_us, 1)) / np.log1p(TIE_PERCENT / 100)).astype(np.int64)


def prune_dominated(problem: Problem) -> tuple[IntArray, int]:
    """Positions of the rows that can be part of an answer to any loosening of the limits, and how many were dropped.

    Row a dominates b on the same class when it needs no more machines and GPUs, breaks no limit by more, is no slower,
    and gives no fewer tokens/s, with the same freedom in replicas. Equal rows keep the first.
    """
    rows = problem.rows
    metrics = [rows.machines(), rows.gpus_per_replica * rows.replicas, rows.e2e_us, -rows.tokens_milli_per_s * np.maximum(rows.replicas, 1)]
    metrics += list(excess(rows, problem.limits).values())
    if problem.goal == "throughput":
        metrics += [-rows.replicas_per_node, rows.nodes_per_replica, -rows.replicas_max]
    elif problem.limits.min_tokens_milli_per_s is None:
        metrics.pop(3)
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

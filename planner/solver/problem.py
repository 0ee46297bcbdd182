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

    def cost_of_run(self, row: int) -> int:
        """Micro-USD of the run of one row; 0 where cost is an hourly rate."""
        return 0 if self.run_cost is None else int(self.run_cost[row])

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


def bucket_start_us(bucket: int) -> float:
    """The shortest duration of a step of duration_bucket, in microseconds."""
    return float(np.exp(bucket * np.log1p(TIE_PERCENT / 100)))


def prune_dominated(problem: Problem) -> tuple[IntArray, int]:
    """Positions of the rows that can be part of an answer to any loosening of the limits, and how many were dropped.

    Row a dominates b on the same class when it ranks no worse by the goal (lexicographic, so one column), needs no more
    machines, and breaks no limit by more. Equal rows keep the first.
    """
    rows = problem.rows
    columns = [_goal_rank(problem), rows.machines(), *excess(rows, problem.limits).values()]
    group = rows.hardware
    if rows.run_cost is not None:
        columns.append(rows.run_cost)
    if problem.goal == "throughput":
        # more machines carry more replicas of either row; rows that span machines only compare with the same span
        group = rows.hardware * (1 + int(rows.nodes_per_replica.max(initial=1))) + rows.nodes_per_replica
        most = rows.replicas_max * rows.tokens_milli_per_s
        columns.append(_rank([-most, rows.duration_us, rows.gpus_per_replica]))
    elif "min_throughput" in problem.limits:
        columns.append(-rows.tokens_milli_per_s * rows.replicas)
    table = np.stack(columns, axis=1)
    worth = np.flatnonzero(_within_best(problem, columns, group))
    kept: list[IntArray] = []
    order = worth[np.argsort(group[worth], kind="stable")]
    for here in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        kept.append(here[pareto(table[here])])
    keep = np.sort(np.concatenate(kept)) if kept else np.zeros(0, dtype=np.int64)
    return keep, len(rows) - len(keep)


def _within_best(problem: Problem, columns: list[IntArray], group: IntArray) -> NDArray[np.bool_]:
    """False for rows that rank behind a row of their group that keeps all row limits and needs no more machines.

    A quick first pass of the same dominance; only goals whose rank starts with the machines can use it.
    """
    everything = np.ones(len(group), dtype=np.bool_)
    if (
        problem.goal != "cheapest"
        or problem.rows.run_cost is not None
        or "min_throughput" in problem.limits
        or not len(group)
    ):
        return everything
    clean = everything
    for over in excess(problem.rows, problem.limits).values():
        clean = clean & (over == 0)
    best = np.full(int(group.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(best, group[clean], columns[0][clean])
    return columns[0] <= best[group]


def _goal_rank(problem: Problem) -> IntArray:
    """Rank of each row by what the goal sees of it on a given class: equal keys have equal ranks."""
    rows = problem.rows
    gpus = rows.gpus_per_replica * rows.replicas
    if problem.goal == "throughput":
        per_machine = rows.tokens_milli_per_s * np.maximum(rows.replicas_per_node, 1)
        return _rank([-per_machine, rows.duration_us, gpus])
    cost = rows.machines() if rows.run_cost is None else rows.run_cost
    first = [cost] if problem.goal == "cheapest" else [rows.duration_bucket, cost]
    return _rank([*first, rows.duration_us, gpus])


def _rank(keys: list[IntArray]) -> IntArray:
    """Dense lexicographic rank of each row by the keys, most important first."""
    if not len(keys[0]):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort(keys[::-1])
    changes = np.zeros(len(order), dtype=np.bool_)
    for key in keys:
        ranked = key[order]
        changes[1:] |= ranked[1:] != ranked[:-1]
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.cumsum(changes)
    return rank


def pareto(points: IntArray) -> IntArray:
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

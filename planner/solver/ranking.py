"""Closed form of the problem for one row at a time: what it costs, what it breaks, how it ranks.

The solver proves the winner; this ranks the rest, for alternatives, `compare` and the words about what binds. Tests
hold the two against each other and against an exhaustive oracle.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.solver.problem import ALL_LIMITS, UNBOUNDED, IntArray, LimitName, OfferColumn, Problem, excess

VRAM_SCALE_KIB = 80 * 2**20


JUST = 0.25  # a limit missed by up to a quarter is just broken


@dataclass(frozen=True)
class Ranking:
    """Per row of the problem, at its best number of replicas.

    machines, cost (what `cheapest` minimises, micro-USD), place: of the cheapest place that can supply the machines (cost UNBOUNDED when
    none can, ignoring budget). broken: by how much each limit is broken. key: lexicographic goal, lower is better.
    """

    replicas: IntArray
    machines: IntArray
    cost: IntArray
    place: IntArray
    broken: dict[LimitName, IntArray]
    key: IntArray

    @property
    def broken_count(self) -> IntArray:
        """How many limits each row breaks."""
        return np.asarray(np.sum([v > 0 for v in self.broken.values()], axis=0), dtype=np.int64)

    def shortfall(self, problem: Problem) -> NDArray[np.float64]:
        """By how much a row breaks its limits, as a share of them, summed: 0.2 is a limit missed by 20%."""
        rows, limits = problem.rows, problem.limits
        shares = []
        for name, over in self.broken.items():
            allowed: IntArray | int = limits.get(name, 0)
            if name == "quota":
                allowed = self.machines
            elif name in ("vram", "host_ram"):
                allowed = rows.metrics[name] - rows.metrics[name] + VRAM_SCALE_KIB
            shares.append(over / np.maximum(1, allowed))
        return np.asarray(np.sum(shares, axis=0), dtype=np.float64)

    def barely(self, allowed: NDArray[np.bool_], problem: Problem) -> NDArray[np.bool_]:
        """Of the allowed rows those that miss their limits by least, and by no more than JUST of them."""
        miss = np.where(allowed, self.shortfall(problem), np.inf)
        return np.asarray(allowed & (miss <= min(miss.min(initial=np.inf), JUST)))

    def order(self, allowed: NDArray[np.bool_]) -> IntArray:
        """Positions of the allowed rows, best first."""
        at = np.flatnonzero(allowed)
        return at[np.lexsort(self.key[at].T[::-1])]


def fill(offers: list[OfferColumn], machines: int) -> tuple[int, int]:
    """Cheapest cost of so many machines of one place, and how many are missing when its limits end first."""
    cost, left = 0, machines
    for offer in sorted(offers, key=lambda o: o.micro_usd_per_hour):
        n = left if offer.limit is None else min(left, offer.limit)
        cost, left = cost + n * offer.micro_usd_per_hour, left - n
    return cost, left


def _supply(problem: Problem, machines: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """(cost, place, missing machines) per row: the cheapest place that has enough, else the one that lacks fewest."""
    by_class: dict[int, dict[int, list[OfferColumn]]] = defaultdict(lambda: defaultdict(list))
    for offer in problem.offers:
        by_class[offer.hardware][offer.place].append(offer)
    base = int(machines.max(initial=0)) + 1
    unique, inverse = np.unique(problem.rows.hardware * base + machines, return_inverse=True)
    table = np.empty((len(unique), 3), dtype=np.int64)
    for i, code in enumerate(unique.tolist()):
        hardware, count = divmod(code, base)
        choices = []
        for place, offers in by_class[hardware].items():
            cost, missing = fill(offers, count)
            choices.append((missing, cost, place))
        table[i] = min(choices) if choices else (count, UNBOUNDED, -1)
    picked = table[inverse.reshape(-1)]
    return picked[:, 1], picked[:, 2], picked[:, 0]


def rank(problem: Problem) -> Ranking:
    """Rank all rows. For free replicas (throughput) every row takes as many as its ceiling allows."""
    from planner.solver.constraints import replica_ceilings

    rows, limits = problem.rows, problem.limits
    replicas = rows.replicas
    if problem.goal == "throughput":
        replicas = np.maximum(np.array(replica_ceilings(problem, frozenset(ALL_LIMITS)), dtype=np.int64), rows.replicas)
    machines = rows.machines(replicas)
    cost, place, missing = _supply(problem, machines)
    gpus_of = {offer.hardware: offer.gpus for offer in problem.offers}
    gpus = machines * np.array([gpus_of.get(int(h), 0) for h in rows.hardware], dtype=np.int64)
    broken = dict(excess(rows, limits))
    total: IntArray = cost if rows.run_cost is None else np.where(cost >= UNBOUNDED, UNBOUNDED, rows.run_cost)
    tokens = rows.tokens_milli_per_s * replicas
    taken: dict[LimitName, IntArray] = {"budget": total, "budget_per_hour": cost, "max_gpus": gpus}
    for name, amount in taken.items():
        if name in limits:
            broken[name] = np.maximum(amount - limits[name], 0)
    broken["quota"] = missing
    if "min_throughput" in limits:
        broken["min_throughput"] = np.maximum(limits["min_throughput"] - tokens, 0)
    first: list[IntArray] = {
        "cheapest": [total],
        "fastest": [rows.duration_bucket, total],
        "throughput": [-tokens, total],
    }[problem.goal]
    return Ranking(replicas, machines, total, place, broken, np.stack([*first, rows.duration_us, gpus], axis=1))

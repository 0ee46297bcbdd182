"""Exhaustive oracle: every row, every number of replicas, every place, every split over its offers. Plain Python."""

from __future__ import annotations

import itertools
import math

from planner.solver.problem import OfferColumn, Problem


def _splits(offers: list[OfferColumn], machines: int):
    """Every way to take exactly `machines` machines from the offers within their limits."""
    ranges = [range((machines if o.limit is None else min(machines, o.limit)) + 1) for o in offers]
    for counts in itertools.product(*ranges):
        if sum(counts) == machines:
            yield counts


def solve_exhaustively(problem: Problem) -> tuple | None:
    """The best lexicographic key, or None. Extra machines never help, so exactly the needed number is taken."""
    rows, limits = problem.rows, problem.limits
    best = None
    for r in range(len(rows)):
        if any(rows.metrics[name][r] > limits[name] for name in rows.metrics if name in limits):
            continue
        for replicas in range(int(rows.replicas[r]), int(rows.replicas_max[r]) + 1):
            tokens = replicas * int(rows.tokens_milli_per_s[r])
            if tokens < limits.get("min_throughput", 0):
                continue
            per = int(rows.replicas_per_node[r])
            machines = math.ceil(replicas / per) if per else replicas * int(rows.nodes_per_replica[r])
            mine = [o for o in problem.offers if o.hardware == rows.hardware[r]]
            for place in {o.place for o in mine}:
                here = [o for o in mine if o.place == place]
                for counts in _splits(here, machines):
                    cost = sum(n * o.micro_usd_per_hour for n, o in zip(counts, here, strict=True))
                    total = cost if rows.run_cost is None else int(rows.run_cost[r])
                    gpus = sum(n * o.gpus for n, o in zip(counts, here, strict=True))
                    if total > limits.get("budget", math.inf) or cost > limits.get("budget_per_hour", math.inf):
                        continue
                    if gpus > limits.get("max_gpus", math.inf):
                        continue
                    first = {
                        "cheapest": (total,),
                        "fastest": (int(rows.duration_bucket[r]), total),
                        "throughput": (-tokens, total),
                    }[problem.goal]
                    key = (*first, int(rows.duration_us[r]), gpus)
                    if best is None or key < best:
                        best = key
    return best

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
        if rows.required_kib[r] > rows.capacity_kib[r]:
            continue
        if limits.ttft_us is not None and rows.ttft_us[r] > limits.ttft_us:
            continue
        if limits.tpot_us is not None and rows.tpot_us[r] > limits.tpot_us:
            continue
        if limits.e2e_us is not None and rows.e2e_us[r] > limits.e2e_us:
            continue
        if limits.accuracy_loss_ppm is not None and rows.accuracy_loss_ppm[r] > limits.accuracy_loss_ppm:
            continue
        for replicas in range(int(rows.replicas[r]), int(rows.replicas_max[r]) + 1):
            tokens = replicas * int(rows.tokens_milli_per_s[r])
            if limits.min_tokens_milli_per_s is not None and tokens < limits.min_tokens_milli_per_s:
                continue
            per = int(rows.replicas_per_node[r])
            machines = math.ceil(replicas / per) if per else replicas * int(rows.nodes_per_replica[r])
            mine = [o for o in problem.offers if o.hardware == rows.hardware[r]]
            for place in {o.place for o in mine}:
                here = [o for o in mine if o.place == place]
                for counts in _splits(here, machines):
                    cost = sum(n * o.micro_usd_per_hour for n, o in zip(counts, here, strict=True))
                    gpus = sum(n * o.gpus for n, o in zip(counts, here, strict=True))
                    if limits.budget_micro_usd_per_hour is not None and cost > limits.budget_micro_usd_per_hour:
                        continue
                    if limits.max_gpus is not None and gpus > limits.max_gpus:
                        continue
                    first = {"cheapest": (cost,), "fastest": (int(rows.latency_bucket[r]), cost), "throughput": (-tokens, cost)}[problem.goal]
                    key = (*first, int(rows.e2e_us[r]), gpus)
                    if best is None or key < best:
                        best = key
    return best

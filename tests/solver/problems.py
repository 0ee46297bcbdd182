"""Random small problems for the oracle, and hypothesis strategies over them."""

from __future__ import annotations

import numpy as np

from planner.solver.problem import OfferColumn, Problem, Rows, duration_bucket


def random_problem(seed: int, goal: str | None = None) -> Problem:
    """A problem of up to 14 rows on up to 4 classes and 7 offers; limits set at random so that some are infeasible."""
    g = np.random.default_rng(seed)
    goal = goal or ("cheapest", "fastest", "throughput")[seed % 3]
    classes, n = int(g.integers(1, 5)), int(g.integers(1, 15))
    gpus_per_node = g.choice([1, 2, 4, 8], classes)
    hardware = g.integers(0, classes, n)
    spans = g.random(n) < 0.2
    per_node = np.where(spans, 0, np.minimum(g.choice([1, 2, 3, 4], n), gpus_per_node[hardware]))
    nodes = np.where(spans, g.integers(2, 4, n), 1)
    replicas = g.integers(1, 4, n)
    free = replicas + g.integers(0, 4, n)
    e2e = g.integers(1, 40, n) * 250_000
    rows = Rows(
        hardware=hardware,
        replicas=np.ones(n, dtype=np.int64) if goal == "throughput" else replicas,
        replicas_max=free if goal == "throughput" else replicas,
        replicas_per_node=per_node,
        nodes_per_replica=nodes,
        gpus_per_replica=np.maximum(gpus_per_node[hardware] // np.maximum(per_node, 1), 1) * nodes,
        duration_us=e2e,
        duration_bucket=duration_bucket(e2e),
        tokens_milli_per_s=g.integers(1, 9, n) * 100_000,
        metrics={
            "vram": g.integers(1, 12, n) - g.integers(5, 14, n),
            "ttft": g.integers(1, 10, n) * 50_000,
            "tpot": g.integers(1, 10, n) * 10_000,
            "e2e": e2e,
            "max_accuracy_loss": g.choice([0, 3_000, 9_000, 20_000], n),
        },
    )
    offers = tuple(
        OfferColumn(
            h := int(g.integers(0, classes)),
            int(g.integers(0, 3)),
            int(g.integers(1, 30)) * 100_000,
            int(gpus_per_node[h]),
            int(g.integers(0, 5)) if g.random() < 0.4 else None,
        )
        for _ in range(int(g.integers(1, 8)))
    )

    def maybe(low: int, high: int, step: int, chance: float = 0.4) -> int | None:
        return int(g.integers(low, high)) * step if g.random() < chance else None

    limits = {
        "vram": 0,
        "ttft": maybe(2, 9, 50_000),
        "tpot": maybe(2, 9, 10_000),
        "e2e": maybe(8, 40, 250_000),
        "max_accuracy_loss": maybe(0, 3, 10_000, 0.6),
        "budget": maybe(5, 80, 100_000),
        "max_gpus": maybe(1, 20, 1),
        "min_throughput": maybe(1, 20, 100_000, 0.2),
    }
    limits = {name: value for name, value in limits.items() if value is not None}
    return Problem(goal, rows, offers, limits)

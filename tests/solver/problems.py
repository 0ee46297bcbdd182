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


def random_training_problem(seed: int) -> Problem:
    """A training problem: one offer per class, whole machines per row, a cost of the run beside the hourly price."""
    g = np.random.default_rng(seed)
    goal = ("cheapest", "fastest")[seed % 2]
    count, n = int(g.integers(1, 5)), int(g.integers(1, 20))
    gpus = g.choice([1, 4, 8], count)
    offers = tuple(
        OfferColumn(
            h,
            int(g.integers(0, 3)),
            int(g.integers(1, 30)) * 100_000,
            int(gpus[h]),
            int(g.integers(0, 9)) if g.random() < 0.5 else None,
        )
        for h in range(count)
    )
    hardware, machines = g.integers(0, count, n), g.integers(1, 8, n)
    duration = g.integers(1, 60, n) * 60_000_000
    price = np.array([o.micro_usd_per_hour for o in offers])[hardware]
    ones = np.ones(n, dtype=np.int64)
    rows = Rows(
        hardware=hardware,
        replicas=ones,
        replicas_max=ones,
        replicas_per_node=0 * ones,
        nodes_per_replica=machines,
        gpus_per_replica=gpus[hardware] * machines,
        duration_us=duration,
        duration_bucket=duration_bucket(duration),
        tokens_milli_per_s=g.integers(1, 9, n) * 100_000,
        metrics={
            "vram": g.integers(-5, 4, n),
            "host_ram": g.integers(-9, 3, n),
            "step_time": g.integers(1, 10, n) * 1_000_000,
            "deadline": duration,
        },
        run_cost=np.ceil(duration / 3.6e9 * machines * price).astype(np.int64),
    )
    limits = {"vram": 0, "host_ram": 0}
    for name, low, high, step in (
        ("step_time", 3, 10, 1_000_000),
        ("deadline", 5, 60, 60_000_000),
        ("budget", 1, 60, 100_000),
        ("budget_per_hour", 5, 120, 100_000),
        ("max_gpus", 1, 40, 1),
    ):
        if g.random() < 0.35:
            limits[name] = int(g.integers(low, high)) * step
    return Problem(goal, rows, offers, limits)

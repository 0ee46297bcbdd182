"""The solver equals an exhaustive search; pruning changes nothing; the closed-form ranking agrees with both."""

import pytest

from planner.solver.problem import ALL_LIMITS, prune_dominated
from planner.solver.ranking import rank
from planner.solver.search import solve_problem
from tests.solver.oracle import solve_exhaustively
from tests.solver.problems import random_problem, random_training_problem

PROBLEMS = 500


def answer_key(problem, answer):
    """The lexicographic key of a solver answer, recomputed from its decisions, after checking that they hold together."""
    rows, r = problem.rows, answer.row
    offers = [(problem.offers[o], n) for o, n in answer.machines.items()]
    assert len({o.place for o, _ in offers}) == 1
    mine = sum(n for o, n in offers if o.hardware == rows.hardware[r])
    assert mine * max(int(rows.replicas_per_node[r]), 1) >= answer.replicas * int(rows.nodes_per_replica[r])
    assert all(o.limit is None or n <= o.limit for o, n in offers)
    cost = sum(o.micro_usd_per_hour * n for o, n in offers)
    gpus = sum(o.gpus * n for o, n in offers)
    tokens = int(rows.tokens_milli_per_s[r]) * answer.replicas
    total = cost if rows.run_cost is None else int(rows.run_cost[r])
    first = {"cheapest": (total,), "fastest": (int(rows.duration_bucket[r]), total), "throughput": (-tokens, total)}[
        problem.goal
    ]
    return (*first, int(rows.duration_us[r]), gpus)


@pytest.mark.parametrize("make", [random_problem, random_training_problem])
@pytest.mark.parametrize("block", range(10))
def test_solver_equals_exhaustive_search(block, make):
    feasible = 0
    for seed in range(block * PROBLEMS // 10, (block + 1) * PROBLEMS // 10):
        problem = make(seed)
        want = solve_exhaustively(problem)
        keep, _ = prune_dominated(problem)
        pruned = problem.with_rows(problem.rows.take(keep))
        answer = solve_problem(pruned)
        if want is None:
            assert answer.status == "INFEASIBLE", seed
            continue
        feasible += 1
        assert answer.status == "OPTIMAL", seed
        assert answer_key(pruned, answer) == want, seed
        assert answer.objective == answer.bound
    assert feasible >= 10


@pytest.mark.parametrize("goal", ["cheapest", "fastest"])
def test_ranking_equals_exhaustive_search(goal):
    for seed in range(1000, 1150):
        problem = random_problem(seed, goal)
        ranking = rank(problem)
        best = ranking.order(ranking.broken_count == 0)
        want = solve_exhaustively(problem)
        assert (tuple(ranking.key[best[0]]) if len(best) else None) == want, seed


def test_pruning_keeps_the_answer_under_every_loosening():
    for seed in range(2000, 2120):
        problem = random_problem(seed) if seed % 4 else random_training_problem(seed)
        keep, dropped = prune_dominated(problem)
        assert dropped == len(problem.rows) - len(keep)
        pruned = problem.with_rows(problem.rows.take(keep))
        for name in ALL_LIMITS:
            enforced = frozenset(ALL_LIMITS) - {name}
            full, small = solve_problem(problem, enforced=enforced), solve_problem(pruned, enforced=enforced)
            assert full.status == small.status, (seed, name)
            if full.row is not None:
                assert full.objective == small.objective, (seed, name)

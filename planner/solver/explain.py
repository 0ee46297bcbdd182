"""Why the answer is what it is: which limits bind, and, when there is no answer, which clash and what would help."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.solver.constraints import Programme, hourly_cost, total_cost, total_gpus, total_tokens
from planner.solver.problem import ALL_LIMITS, ROW_LIMITS, IntArray, LimitName, Problem, excess
from planner.solver.ranking import Ranking
from planner.solver.search import Answer, Objective, solve_problem

BOUNDS: tuple[LimitName, ...] = ("budget", "max_gpus", "quota")
MEMORY: tuple[LimitName, ...] = ("vram", "host_ram")


def feasible_without(problem: Problem, without: frozenset[LimitName], time_limit_s: float) -> bool:
    """True when an answer exists once the limits in `without` are dropped."""
    answer = solve_problem(
        problem, enforced=frozenset(ALL_LIMITS) - without, objectives=(("min", total_gpus),), time_limit_s=time_limit_s
    )
    return answer.row is not None


def clashing_limits(problem: Problem, time_limit_s: float = 10.0) -> tuple[LimitName, ...]:
    """A smallest set of limits that cannot hold together: drop one limit after the other while the rest still clashes.

    Every limit of the result is needed for the clash. Memory that no configuration keeps is the reason, whatever else does not hold
    either. Empty when there is no configuration at all, whatever the limits.
    """
    if not feasible_without(problem, frozenset(ALL_LIMITS), time_limit_s):
        return ()
    over = excess(problem.rows, problem.limits)
    for name in MEMORY:
        if name in over and bool((over[name] > 0).all()):
            return (name,)
    core: list[LimitName] = [n for n in ALL_LIMITS if n in problem.limits or n == "quota"]
    for name in tuple(core):
        rest = [n for n in core if n != name]
        if not feasible_without(problem, frozenset(ALL_LIMITS) - frozenset(rest), time_limit_s):
            core = rest
    return tuple(core)


def _row_excess(name: LimitName) -> Objective:
    def total(p: Programme) -> object:
        over: IntArray = excess(p.problem.rows, p.problem.limits)[name]
        return sum(v * x for v, x in zip(over.tolist(), p.x, strict=True) if v)

    return ("min", total)


def _over_quota(p: Programme) -> object:
    """Machines taken beyond the quotas of their offers."""
    over = []
    for o, offer in enumerate(p.problem.offers):
        if offer.limit is None:
            continue
        extra = p.model.new_int_var(0, max(p.bounds[o], 0), f"over{o}")
        p.model.add(extra >= p.machines[o] - offer.limit)
        over.append(extra)
    return sum(over)


def smallest_relaxation(problem: Problem, name: LimitName, time_limit_s: float = 10.0) -> Answer | None:
    """The answer that breaks only `name`, by as little as possible; None when dropping it alone does not help."""
    objective: Objective
    if name in ROW_LIMITS:
        objective = _row_excess(name)
    else:
        objective = {
            "budget": ("min", total_cost),
            "budget_per_hour": ("min", hourly_cost),
            "max_gpus": ("min", total_gpus),
            "quota": ("min", _over_quota),
            "min_throughput": ("max", total_tokens),
        }[name]  # type: ignore[assignment]
    answer = solve_problem(
        problem,
        enforced=frozenset(ALL_LIMITS) - {name},
        objectives=(objective, ("min", total_cost)),
        time_limit_s=time_limit_s,
    )
    return answer if answer.row is not None else None


@dataclass(frozen=True)
class Binding:
    """A limit that holds the answer where it is, and the best row that breaks only this limit."""

    limit: LimitName
    row: int


def binding_limits(problem: Problem, ranking: Ranking, winner_key: IntArray) -> tuple[Binding, ...]:
    """Limits without which a better row would win: rows that rank before the winner and break exactly one limit.

    Better means better in the goal itself (cost, latency step or tokens), not in the tie-breaks. VRAM binds in this
    sense too: a configuration that would win but does not fit. Goal throughput takes as many replicas as the limits on
    money and machines allow, row by row, so that none of those can be dropped alone: they are left out here.
    """
    count = ranking.broken_count
    better = ranking.key[:, 0] < winner_key[0]
    found = []
    for name in ranking.broken:
        if problem.goal == "throughput" and name in BOUNDS:
            continue
        rows = ranking.order(better & (count == 1) & (ranking.broken[name] > 0))
        if len(rows):
            found.append(Binding(name, int(rows[0])))
    return tuple(found)


def nearest_misses(ranking: Ranking) -> dict[LimitName, int]:
    """How many rows each limit alone rules out (rows that break nothing else)."""
    count = ranking.broken_count
    return {
        name: int(np.sum((count == 1) & (over > 0)))
        for name, over in ranking.broken.items()
        if np.any((count == 1) & (over > 0))
    }

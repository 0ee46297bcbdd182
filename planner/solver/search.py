"""Solving a programme: lexicographic objectives, deterministic, bounded in time, with status and bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from planner.errors import PlannerError
from planner.solver.constraints import (
    Programme,
    build,
    duration,
    duration_step,
    fix_throughput,
    total_cost,
    total_gpus,
    total_tokens,
)
from planner.solver.problem import ALL_LIMITS, LimitName, Problem

Expression = Callable[[Programme], Any]
Objective = tuple[Literal["min", "max"], Expression]


OBJECTIVES: dict[str, tuple[Objective, ...]] = {
    "cheapest": (("min", total_cost), ("min", duration), ("min", total_gpus)),
    "fastest": (("min", duration_step), ("min", total_cost), ("min", duration), ("min", total_gpus)),
    "throughput": (("max", total_tokens), ("min", total_cost), ("min", duration), ("min", total_gpus)),
}


@dataclass(frozen=True)
class Answer:
    """What came out. status: OPTIMAL, FEASIBLE (a time limit stopped the proof), INFEASIBLE, UNKNOWN.

    row, replicas and machines (count by offer) are set when there is an answer; objective and bound of the first goal.
    """

    status: str
    row: int | None
    replicas: int
    machines: dict[int, int]
    objective: float | None
    bound: float | None
    wall_s: float
    variables: int
    constraints: int
    named: tuple[str, ...]


def solve_problem(
    problem: Problem,
    *,
    enforced: frozenset[LimitName] = frozenset(ALL_LIMITS),
    objectives: tuple[Objective, ...] | None = None,
    time_limit_s: float = 30.0,
    seed: int = 0,
) -> Answer:
    """Find the best answer and prove it.

    Objectives are taken one after the other; each is fixed at its optimum before the next. The status is that of the
    first unless a later one runs out of time.
    """
    from ortools.sat.python import cp_model

    start = time.perf_counter()
    if not len(problem.rows) or not problem.offers:
        return Answer("INFEASIBLE", None, 0, {}, None, None, 0.0, 0, 0, ())
    p = build(problem, enforced)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    status, objective, bound, answer = "UNKNOWN", None, None, None
    steps = objectives if objectives is not None else OBJECTIVES[problem.goal]
    for i, (direction, expression) in enumerate(steps):
        left = time_limit_s - (time.perf_counter() - start)
        if left <= 0:
            status = "FEASIBLE"
            break
        solver.parameters.max_time_in_seconds = left
        target = expression(p)
        if direction == "min":
            p.model.minimize(target)
        else:
            p.model.maximize(target)
        code = solver.solve(p.model)
        if code not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            if code == cp_model.MODEL_INVALID:
                raise PlannerError(
                    "the solver refused the model", p.model.validate()[:160], "Please report this with your command."
                )
            if i == 0:
                status = "INFEASIBLE" if code == cp_model.INFEASIBLE else "UNKNOWN"
            break
        answer = _read(p, solver)
        if i == 0:
            status = solver.status_name(code)
            objective, bound = float(round(solver.objective_value)), float(round(solver.best_objective_bound))
        elif code != cp_model.OPTIMAL:
            status = "FEASIBLE"
        if code != cp_model.OPTIMAL:
            break
        if i + 1 < len(steps):
            p.model.clear_objective()
            p.model.add(target == round(solver.objective_value))
            if expression is total_tokens:
                fix_throughput(p, round(solver.objective_value))
    row, replicas, machines = answer if answer is not None else (None, 0, {})
    proto = p.model.proto
    return Answer(
        status,
        row,
        replicas,
        machines,
        objective,
        bound,
        time.perf_counter() - start,
        len(proto.variables),
        p.constraints,
        tuple(p.named),
    )


def _read(p: Programme, solver: Any) -> tuple[int, int, dict[int, int]]:
    row = next(r for r, x in enumerate(p.x) if solver.boolean_value(x))
    machines = {o: int(solver.value(n)) for o, n in enumerate(p.machines) if solver.value(n)}
    return row, int(solver.value(p.replicas[row])), machines

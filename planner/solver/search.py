"""Solving a programme: lexicographic objectives, deterministic, bounded in time, with status and bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from planner.errors import InputError, PlannerError
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
from planner.units import format_duration

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
        target = expression(p)
        found = _optimise(p, solver, (direction, target), time_limit_s - (time.perf_counter() - start))
        if found in ("OPTIMAL", "FEASIBLE"):
            answer = _read(p, solver)
        if i == 0:
            status = found
            if answer is not None:
                objective, bound = float(round(solver.objective_value)), float(round(solver.best_objective_bound))
        elif found != "OPTIMAL":
            status = "FEASIBLE"  # the goal itself is proved, a tie-break is not
        if found != "OPTIMAL":
            break
        if i + 1 < len(steps):
            _fix(p, expression, target, round(solver.objective_value))
    row, replicas, machines = answer if answer is not None else (None, 0, {})
    wall_s, variables = time.perf_counter() - start, len(p.model.proto.variables)
    return Answer(status, row, replicas, machines, objective, bound, wall_s, variables, p.constraints, tuple(p.named))


def _optimise(p: Programme, solver: Any, objective: tuple[str, Any], left_s: float) -> str:
    """Status of one objective within the time that is left: OPTIMAL, FEASIBLE, INFEASIBLE or UNKNOWN."""
    from ortools.sat.python import cp_model

    if left_s <= 0:
        return "UNKNOWN"
    solver.parameters.max_time_in_seconds = left_s
    direction, target = objective
    if direction == "min":
        p.model.minimize(target)
    else:
        p.model.maximize(target)
    code = solver.solve(p.model)
    if code == cp_model.MODEL_INVALID:
        raise PlannerError(
            "the solver refused the model", p.model.validate()[:160], "Please report this with your command."
        )
    return str(solver.status_name(code))


def _fix(p: Programme, expression: Expression, target: Any, value: int) -> None:
    """Keep an objective at its optimum while the next one is taken."""
    p.model.clear_objective()
    p.model.add(target == value)
    if expression is total_tokens:
        fix_throughput(p, value)


def no_answer_in_time(answer: Answer, time_limit_s: float) -> InputError | None:
    """The error when the time limit came before any answer; None when there is an answer or a proof that there is none."""
    if answer.row is not None or answer.status == "INFEASIBLE":
        return None
    return InputError(
        f"no answer within {format_duration(time_limit_s)}",
        "the time limit came before the search found one or proved that there is none",
        "Raise --time-limit.",
    )


def _read(p: Programme, solver: Any) -> tuple[int, int, dict[int, int]]:
    row = next(r for r, x in enumerate(p.x) if solver.boolean_value(x))
    machines = {o: int(solver.value(n)) for o, n in enumerate(p.machines) if solver.value(n)}
    return row, int(solver.value(p.replicas[row])), machines

"""Why there is no training run: the limits that clash and the smallest change that helps, or what the time limit left unproved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.estimator.operating_point import IntArray
from planner.hardware.records import Catalog
from planner.plan import SCHEMA_VERSION, Deployment, Infeasible, Plan, Relaxation, SolverReport
from planner.request import Goal, TrainLimits, TrainRequest
from planner.solver import train_words
from planner.solver.assemble import model_summary, provenance, request_dict
from planner.solver.explain import clashing_limits, smallest_relaxation
from planner.solver.problem import LimitName, Problem, prune_dominated
from planner.solver.search import solve_problem
from planner.solver.train_block import NOT_IN_TIME, SPLITS_LATE
from planner.solver.train_site import LONGEST_S
from planner.solver.train_study import TrainStudy, beyond_bounds, bounds, make_train_study
from planner.units import format_duration

WIDE = 1e9
EXPLAIN_S = 20.0
SHORTER = 1e-3  # of LONGEST_S: a run whose time is linear in its tokens


def pruned(problem: Problem) -> tuple[Problem, IntArray, int]:
    """The problem without dominated rows, the positions kept, and how many were dropped."""
    if not len(problem.rows):
        return problem, np.zeros(0, dtype=np.int64), 0
    keep, dropped = prune_dominated(problem)
    rows = problem.rows.take(keep)
    used = {int(h) for h in np.unique(rows.hardware)}
    offers = tuple(o if o.hardware in used else replace(o, limit=0) for o in problem.offers)
    return replace(problem, rows=rows, offers=offers), keep, dropped


def left_undone(study: TrainStudy) -> int:
    """How much the time limit left undone: choices of machines, and layouts whose stages it left as they were."""
    return study.pruned.get(NOT_IN_TIME, 0) + study.pruned.get(SPLITS_LATE, 0)


@dataclass(frozen=True)
class Wider:
    """A second look at a request without an answer: the widest table (nothing is dropped for being hopeless), and its useful rows."""

    study: TrainStudy
    problem: Problem
    keep: IntArray


def wider(study: TrainStudy, catalog: Catalog, excluded: Sequence[Deployment]) -> Wider:
    """The second look, in the order that shows soonest what is to blame. It has a time of its own, EXPLAIN_S or the request's limit when
    that is shorter. Its goal is the request's again: only the order in which hardware was looked at differed."""
    request = study.request
    goal = _goal_of_explanation(study, bounds(request, study.model, study.classes))
    asked = replace(request, goal=goal, time_limit_s=min(request.time_limit_s, EXPLAIN_S))
    wide = make_train_study(asked, study.model, catalog, near_miss=WIDE, explain=True, excluded=excluded)
    wide = replace(wide, request=replace(asked, goal=request.goal), problem=replace(wide.problem, goal=request.goal))
    problem, keep, _ = pruned(wide.problem)
    return Wider(wide, problem, keep)


def endless(study: TrainStudy) -> bool:
    """True when no run of the request ends within LONGEST_S, on any of its hardware."""
    least_s, _ = bounds(study.request, study.model, study.classes)
    return bool(np.isfinite(least_s) and least_s > LONGEST_S)


def endless_plan(study: TrainStudy, catalog: Catalog, report: SolverReport) -> Plan:
    """The infeasible plan of an endless request."""
    least_s, _ = bounds(study.request, study.model, study.classes)
    return _infeasible(
        study, catalog, report, (_endless(study.request, least_s),), _fewer_tokens(study, catalog, least_s), ()
    )


def no_plan(study: TrainStudy, look: Wider, catalog: Catalog, report: SolverReport) -> Plan:
    """The infeasible plan of a study without an answer: what clashes and what would help. Where the study was cut short it says that nothing
    is proved."""
    wide, problem = look.study, look.problem
    core = clashing_limits(problem) if len(problem.rows) else ()
    relaxations = []
    for name in core:
        answer = smallest_relaxation(problem, name)
        if answer is not None and answer.row is not None:
            relaxations.append(train_words.relaxation(wide, name, int(look.keep[answer.row]), answer))
    core = (
        core or beyond_bounds(study.request, bounds(study.request, study.model, study.classes))[:1]
    )  # proved without rows
    words = train_words.core(wide, core) if core else train_words.nothing_at_all(wide)
    return _infeasible(study, catalog, report, words, tuple(relaxations), (*_unproved(study), *_partial(study, wide)))


def _goal_of_explanation(study: TrainStudy, least: tuple[float, float]) -> Goal:
    """What to look for first: the fastest run where the deadline may be to blame, the cheapest where the budget is, else the goal."""
    impossible: tuple[LimitName, ...] = beyond_bounds(study.request, least)
    if "deadline" in impossible or (left_undone(study) and study.request.limits.deadline_s is not None):
        return "fastest"
    return "cheapest" if "budget" in impossible else study.request.goal


def _endless(request: TrainRequest, least_s: float) -> str:
    """The reason where every run is beyond LONGEST_S."""
    return (
        f"--tokens: {request.job.tokens:.4g} tokens take at least {least_s / (365.25 * 86400):,.0f} years on the fastest hardware of the"
        " request, and none of over ten years is planned"
    )


def _fewer_tokens(study: TrainStudy, catalog: Catalog, least_s: float) -> tuple[Relaxation, ...]:
    """The most tokens of a run of LONGEST_S on the fastest hardware: the time of a long run is linear in its tokens. () beside a limit that
    such a run may break."""
    request, limits = study.request, study.request.limits
    if any(v is not None for v in (limits.deadline_s, limits.step_s, limits.budget_usd, limits.budget_usd_per_hour)):
        return ()
    tokens = request.job.tokens * SHORTER * LONGEST_S / least_s
    asked = replace(request, goal="fastest", job=replace(request.job, tokens=tokens), time_limit_s=min(request.time_limit_s, EXPLAIN_S),
                    limits=TrainLimits(max_gpus=request.limits.max_gpus))  # fmt: skip
    found = make_train_study(asked, study.model, catalog)
    answer = solve_problem(found.problem, time_limit_s=EXPLAIN_S)
    if answer.row is None:
        return ()
    run_s = float(found.problem.rows.duration_us[answer.row]) / 1e6
    most = tokens * LONGEST_S / run_s
    return (Relaxation("--tokens", request.job.tokens, float(f"{most * 0.99:.2g}"), "tokens"),)


def _unproved(study: TrainStudy) -> tuple[str, ...]:
    """What is said where time ran out before a proof."""
    if not left_undone(study):
        return ()
    return (
        f"NOT PROVED that there is no plan: the search stopped after {format_duration(study.request.time_limit_s)} and did not look at"
        f" {study.pruned.get(NOT_IN_TIME, 0)} choices of machines, or not at every split of the layers. Raise --time-limit, or narrow"
        " the hardware with --gpu or --provider.",
    )


def _partial(study: TrainStudy, wide: TrainStudy) -> tuple[str, ...]:
    """What the explanation does not know, when its own time ended first."""
    if not left_undone(wide):
        return ()
    proved = "" if left_undone(study) else "That there is no plan is proved; its"
    looked = len({(b.hardware, b.machines) for b in wide.blocks})
    return (
        f"{proved or 'The'} explanation is partial. It stopped after {format_duration(wide.request.time_limit_s)}, having looked at"
        f" {looked} choices of machines and not at {wide.pruned.get(NOT_IN_TIME, 0)}: a smaller change than those named may do, and another"
        " limit may clash too.",
    )


def _infeasible(
    study: TrainStudy,
    catalog: Catalog,
    report: SolverReport,
    core: tuple[str, ...],
    relaxations: tuple[Relaxation, ...],
    notes: tuple[str, ...],
) -> Plan:
    """The plan without a deployment."""
    return Plan(
        schema_version=SCHEMA_VERSION,
        status="infeasible",
        task="train",
        request=request_dict(study.request),
        assumptions=(*notes, *train_words.assumptions(study, None, catalog)),
        warnings=(),
        model=model_summary(study.model),
        deployment=None,
        memory=None,
        predicted={},
        cost=None,
        solver=replace(report, status="UNKNOWN") if left_undone(study) else report,
        binding=(),
        alternatives=(),
        infeasible=Infeasible(core, relaxations),
        provenance=provenance(catalog, ()),
    )

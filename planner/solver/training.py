"""solve for training: the best run, with its proof; or why there is none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.errors import NoPlanError
from planner.estimator.corrections import calibration_notes
from planner.estimator.operating_point import IntArray
from planner.hardware.records import Catalog
from planner.models.spec import ModelSpec
from planner.plan import SCHEMA_VERSION, Alternative, Deployment, Infeasible, Plan, SolverReport
from planner.request import TrainRequest
from planner.solver import train_assemble, train_words
from planner.solver.assemble import model_summary, provenance, request_dict
from planner.solver.explain import binding_limits, clashing_limits, smallest_relaxation
from planner.solver.problem import Problem, prune_dominated
from planner.solver.ranking import Ranking, rank
from planner.solver.search import Answer, no_answer_in_time, solve_problem
from planner.solver.serving import in_units
from planner.solver.train_block import NOT_IN_TIME, SPLITS_LATE
from planner.solver.train_study import TrainStudy, make_train_study
from planner.units import format_duration

WIDE = 1e9
EXPLAIN_S = 20.0


def solve_training(
    request: TrainRequest, model: ModelSpec, catalog: Catalog, excluded: Sequence[Deployment] = ()
) -> Plan:
    """The plan. status 'optimal' carries a proof over all estimated rows and the bound of the rest.

    excluded: deployments that may not be the answer, see planner.solver.exclude.
    """
    start = time.perf_counter()
    study = make_train_study(request, model, catalog, excluded=excluded)
    problem, keep, dropped = pruned(study.problem)
    answer = solve_problem(problem, time_limit_s=request.time_limit_s, seed=request.seed)
    report = _report(study, answer, dropped, start)
    late = no_answer_in_time(answer, request.time_limit_s)
    if late is not None:
        raise late
    if answer.row is None and _late(study):
        raise NoPlanError(
            f"no plan was found within {request.time_limit_s:g} s",
            f"{study.pruned.get(NOT_IN_TIME, 0)} choices of machines were not looked at, or not with every split of the layers",
            "Raise --time-limit or narrow the hardware with --gpu or --provider.",
        )
    if answer.row is None:
        return _no_plan(request, model, catalog, report, excluded)
    row = int(keep[answer.row])
    ranking = rank(study.problem)
    deployed = train_assemble.deployment(study, row)
    return Plan(
        schema_version=SCHEMA_VERSION,
        status="optimal" if answer.status == "OPTIMAL" and not _late(study) else "feasible",
        task="train",
        request=request_dict(request),
        assumptions=(*train_words.assumptions(study, row, catalog), *calibration_notes(catalog, deployed)),
        warnings=(*train_words.warnings(study, row, deployed.offers), *train_assemble.close_calls_of(study, row)),
        model=model_summary(model),
        deployment=deployed,
        memory=train_assemble.memory_use(study, row),
        predicted=train_assemble.predicted(study, row),
        cost=train_assemble.cost(study, row),
        solver=report,
        binding=train_words.binding(study, ranking, binding_limits(study.problem, ranking, ranking.key[row]), row),
        alternatives=alternatives(study, ranking, row),
        infeasible=None,
        provenance=provenance(catalog, deployed.offers),
    )


def pruned(problem: Problem) -> tuple[Problem, IntArray, int]:
    """The problem without dominated rows, the positions kept, and how many were dropped."""
    if not len(problem.rows):
        return problem, np.zeros(0, dtype=np.int64), 0
    keep, dropped = prune_dominated(problem)
    rows = problem.rows.take(keep)
    used = {int(h) for h in np.unique(rows.hardware)}
    offers = tuple(o if o.hardware in used else replace(o, limit=0) for o in problem.offers)
    return replace(problem, rows=rows, offers=offers), keep, dropped


def _report(study: TrainStudy, answer: Answer, dropped: int, start: float) -> SolverReport:
    dropped_by = {**study.pruned, "dominated by a better row of the same offer": dropped}
    return SolverReport(
        status=answer.status,
        objective=in_units(study.request.goal, answer.objective),
        best_bound=in_units(study.request.goal, answer.bound),
        wall_s=round(time.perf_counter() - start, 4),
        variables=answer.variables,
        constraints=answer.constraints,
        candidates=study.candidates,
        pruned={k: v for k, v in dropped_by.items() if v},
    )


def alternatives(study: TrainStudy, ranking: Ranking, winner: int) -> tuple[Alternative, ...]:
    """Up to three answers of different kinds: a near miss, other hardware, another framework, a faster or smaller run."""
    problem = study.problem
    rows = problem.rows
    feasible = ranking.broken_count == 0
    one_broken = (ranking.broken_count == 1) & (ranking.key[:, 0] < ranking.key[winner, 0])
    gpu = np.array([study.offers[int(o)].instance.gpu.name for o in rows.hardware])
    stack = np.array(
        [int(study.blocks[int(b)].rows.framework[int(i)]) for b, i in zip(study.block_of, study.position, strict=True)]
    )
    word = "cheaper" if problem.goal == "cheapest" else "faster"
    kinds = [
        (f"{word}, but just breaks a limit", ranking.barely(one_broken, problem)),
        ("other hardware", feasible & (gpu != gpu[winner])),
        ("other framework", feasible & (stack != stack[winner])),
        ("faster", feasible & (rows.duration_us < 0.8 * rows.duration_us[winner])),
        ("fewer GPUs", feasible & (rows.gpus_per_replica < rows.gpus_per_replica[winner])),
    ]
    found: list[Alternative] = []
    seen: set[object] = {train_assemble.deployment(study, winner)}
    for kind, allowed in kinds:
        for row in ranking.order(allowed)[:1]:
            deployed = train_assemble.deployment(study, int(row))
            if len(found) == 3 or deployed in seen:
                continue
            seen.add(deployed)
            why = train_words.why_not(study, ranking, int(row), winner)
            found.append(
                Alternative(
                    kind, deployed, train_assemble.predicted(study, int(row)), train_assemble.cost(study, int(row)), why
                )
            )
    return tuple(found)


def _late(study: TrainStudy) -> int:
    """How much the time limit left undone: choices of machines, and layouts whose stages it left as they were."""
    return study.pruned.get(NOT_IN_TIME, 0) + study.pruned.get(SPLITS_LATE, 0)


def _partial(study: TrainStudy) -> tuple[str, ...]:
    """What the explanation does not know, when its own time ended first."""
    missed = study.pruned.get(NOT_IN_TIME, 0)
    if not _late(study):
        return ()
    looked = len({(b.hardware, b.machines) for b in study.blocks})
    return (
        f"That there is no plan is proved; its explanation is partial. It stopped after "
        f"{format_duration(study.request.time_limit_s)}, having looked at {looked} choices of machines and not at {missed}: "
        "a smaller change than those named may do, and another limit may clash too.",
    )


def _no_plan(
    request: TrainRequest, model: ModelSpec, catalog: Catalog, report: SolverReport, excluded: Sequence[Deployment]
) -> Plan:
    """Explain an infeasible request over the widest table: nothing is dropped for being hopeless.

    The explanation has a time of its own, EXPLAIN_S or the request's limit when that is shorter.
    """
    bounded = replace(request, time_limit_s=min(request.time_limit_s, EXPLAIN_S))
    study = make_train_study(bounded, model, catalog, near_miss=WIDE, explain=True, excluded=excluded)
    problem, keep, _ = pruned(study.problem)
    core = clashing_limits(problem) if len(problem.rows) else ()
    relaxations = []
    for name in core:
        answer = smallest_relaxation(problem, name)
        if answer is not None and answer.row is not None:
            relaxations.append(train_words.relaxation(study, name, int(keep[answer.row]), answer))
    words = train_words.core(study, core) if core else train_words.nothing_at_all(study)
    return Plan(
        schema_version=SCHEMA_VERSION,
        status="infeasible",
        task="train",
        request=request_dict(request),
        assumptions=(*_partial(study), *train_words.assumptions(study, None, catalog)),
        warnings=(),
        model=model_summary(model),
        deployment=None,
        memory=None,
        predicted={},
        cost=None,
        solver=report,
        binding=(),
        alternatives=(),
        infeasible=Infeasible(words, tuple(relaxations)),
        provenance=provenance(catalog, ()),
    )

"""solve for training: the best run, with its proof; or why there is none."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from planner.estimator.corrections import calibration_notes
from planner.hardware.records import Catalog
from planner.models.spec import ModelSpec
from planner.plan import SCHEMA_VERSION, Alternative, Deployment, Plan, SolverReport
from planner.request import TrainRequest
from planner.solver import train_assemble, train_words
from planner.solver.assemble import model_summary, provenance, request_dict
from planner.solver.explain import binding_limits
from planner.solver.ranking import Ranking, rank
from planner.solver.search import Answer, no_answer_in_time, solve_problem
from planner.solver.serving import in_units
from planner.solver.train_explain import endless, endless_plan, left_undone, no_plan, pruned, wider
from planner.solver.train_study import TrainStudy, make_train_study


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
    partial = left_undone(study) > 0
    if answer.row is None:
        if endless(study):
            return endless_plan(study, catalog, report)
        look = wider(study, catalog, excluded)
        again = solve_problem(look.problem, time_limit_s=request.time_limit_s) if partial else answer
        if again.row is None:
            return no_plan(study, look, catalog, report)
        study, answer, keep = look.study, again, look.keep  # what the first look had no time for
        report = _report(study, answer, dropped, start)
    row = int(keep[answer.row])
    ranking = rank(study.problem)
    deployed = train_assemble.deployment(study, row)
    return Plan(
        schema_version=SCHEMA_VERSION,
        status="optimal" if answer.status == "OPTIMAL" and not partial else "feasible",
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

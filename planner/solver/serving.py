"""solve: the best deployment for a serving request, with its proof; or why there is none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.estimator.corrections import calibration_notes
from planner.hardware.records import Catalog
from planner.models.spec import ModelSpec
from planner.plan import SCHEMA_VERSION, Alternative, Deployment, Infeasible, Plan, Relaxation, SolverReport
from planner.request import Goal, ServeRequest
from planner.solver import assemble, words
from planner.solver.explain import binding_limits, clashing_limits, smallest_relaxation
from planner.solver.problem import ALL_LIMITS, OfferColumn, Problem, bucket_start_us, prune_dominated
from planner.solver.ranking import Ranking, rank
from planner.solver.search import Answer, no_answer_in_time, solve_problem
from planner.solver.study import Study, make_study

WIDE = 1e9
NEARLY_AS_FAST, WORTH_SAVING = 1.05, 0.9


def solve_serving(
    request: ServeRequest, model: ModelSpec, catalog: Catalog, excluded: Sequence[Deployment] = ()
) -> Plan:
    """The plan. status 'optimal' carries a proof over the whole table, 'feasible' a bound, 'infeasible' an explanation.

    excluded: deployments that may not be the answer, see planner.solver.exclude.
    """
    start = time.perf_counter()
    study = make_study(request, model, catalog, excluded=excluded)
    problem, keep, dropped = pruned(study)
    answer = solve_problem(problem, time_limit_s=request.time_limit_s, seed=request.seed)
    report = _report(study, answer, dropped, start)
    late = no_answer_in_time(answer, request.time_limit_s)
    if late is not None:
        raise late
    if answer.row is None:
        return _no_plan(request, model, catalog, report, excluded)
    row = int(keep[answer.row])
    ranking = rank(study.problem)
    deployed = assemble.deployment(study, row, answer.replicas, answer.machines)
    forecast = assemble.predicted(study, row, answer.replicas)
    won = _key(study.problem, row, answer)
    return Plan(
        schema_version=SCHEMA_VERSION,
        status="optimal" if answer.status == "OPTIMAL" else "feasible",
        task="serve",
        request=assemble.request_dict(request),
        assumptions=(*words.assumptions(study, catalog), *calibration_notes(catalog, deployed)),
        warnings=(*assemble.close_calls(request, forecast), *words.warnings(study, row, deployed.offers)),
        model=assemble.model_summary(model),
        deployment=deployed,
        memory=assemble.memory_use(study, row),
        predicted=forecast,
        cost=assemble.cost(study, row, answer.replicas, answer.machines),
        solver=report,
        binding=words.binding(study, ranking, binding_limits(study.problem, ranking, won), row, answer.replicas),
        alternatives=alternatives(study, ranking, row),
        infeasible=None,
        provenance=assemble.provenance(catalog, deployed.offers),
    )


def pruned(study: Study) -> tuple[Problem, np.ndarray, int]:
    """The problem without dominated rows and without offers of classes that have no row left; positions kept; rows dropped."""
    keep, dropped = prune_dominated(study.problem)
    rows = study.problem.rows.take(keep)
    alive = {int(h) for h in np.unique(rows.hardware)}
    offers = tuple(
        o if o.hardware in alive else OfferColumn(o.hardware, o.place, o.micro_usd_per_hour, o.gpus, 0)
        for o in study.problem.offers
    )
    return replace(study.problem, rows=rows, offers=offers), keep, dropped


def _key(problem: Problem, row: int, answer: Answer) -> np.ndarray:
    rows = problem.rows
    cost = sum(problem.offers[o].micro_usd_per_hour * n for o, n in answer.machines.items())
    tokens = int(rows.tokens_milli_per_s[row]) * answer.replicas
    first = {"cheapest": cost, "fastest": int(rows.duration_bucket[row]), "throughput": -tokens}[problem.goal]
    return np.array([first], dtype=np.int64)


def in_units(goal: Goal, value: float | None) -> float | None:
    """An objective as people read it: USD (cheapest), seconds of the step it falls into (fastest), tokens/s (throughput)."""
    if value is None:
        return None
    if goal == "fastest":
        return round(bucket_start_us(int(value)) / 1e6, 6)
    return value * {"cheapest": 1e-6, "throughput": 1e-3}[goal]


def _report(study: Study, answer: Answer, dropped: int, start: float) -> SolverReport:
    dropped_by = {**study.pruned, "dominated by a better row of the same hardware": dropped}
    return SolverReport(
        status=answer.status,
        objective=in_units(study.request.goal, answer.objective),
        best_bound=in_units(study.request.goal, answer.bound),
        wall_s=round(time.perf_counter() - start, 4),
        variables=answer.variables,
        constraints=answer.constraints,
        candidates=len(study.space),
        pruned={k: v for k, v in dropped_by.items() if v},
    )


def machines_of(problem: Problem, ranking: Ranking, row: int) -> dict[int, int]:
    """The cheapest way to take the machines of a ranked row in its place: count by offer position."""
    left, taken = int(ranking.machines[row]), {}
    offers = [
        (o, c)
        for o, c in enumerate(problem.offers)
        if c.hardware == problem.rows.hardware[row] and c.place == ranking.place[row]
    ]
    for o, column in sorted(offers, key=lambda pair: pair[1].micro_usd_per_hour):
        n = left if column.limit is None else min(left, column.limit)
        if n:
            taken[o] = n
        left -= n
    if left and offers:
        taken[offers[0][0]] = taken.get(offers[0][0], 0) + left
    return taken


def _kinds(study: Study, ranking: Ranking, winner: int) -> list[tuple[str, NDArray[np.bool_]]]:
    """Names of the kinds of alternatives, most telling first, and the rows that each allows."""
    problem, rows = study.problem, study.problem.rows
    feasible = ranking.broken_count == 0
    one_broken = (ranking.broken_count == 1) & (ranking.key[:, 0] < ranking.key[winner, 0])
    pair = study.rows.pair[study.placed.row]
    shard_of, engine_of = np.array(study.space.pairs, dtype=np.int64)[pair].T
    gpu = np.array([s.gpu.name for s in study.space.shards])[shard_of]
    precision = np.array([s.precision.name for s in study.space.shards])[shard_of]
    provider_of = {c.place: study.offers[o].instance.provider for o, c in enumerate(problem.offers)}
    provider = np.array([provider_of.get(int(p), "-") for p in ranking.place])
    near = (rows.duration_us <= NEARLY_AS_FAST * rows.duration_us[winner]) & (
        ranking.cost <= WORTH_SAVING * ranking.cost[winner]
    )
    better = "cheaper" if problem.goal == "cheapest" else "better"
    return [
        ("nearly as fast, cheaper", feasible & near & (problem.goal == "fastest")),
        (f"{better}, but just breaks a limit", ranking.barely(one_broken, problem)),
        ("other hardware", feasible & (gpu != gpu[winner])),
        ("other precision", feasible & (precision != precision[winner])),
        ("other provider", feasible & (provider != provider[winner])),
        ("other engine", feasible & (engine_of != engine_of[winner])),
        ("lower latency", feasible & (rows.duration_us < words.MUCH_FASTER * rows.duration_us[winner])),
    ]


def alternatives(study: Study, ranking: Ranking, winner: int) -> tuple[Alternative, ...]:
    """Up to three answers of different kinds: other hardware, another precision or engine, and a cheaper near miss."""
    found: list[Alternative] = []
    seen: set[tuple[object, ...]] = set()
    for kind, allowed in _kinds(study, ranking, winner):
        order = ranking.order(allowed)
        if not len(order) or len(found) == 3:
            continue
        row = int(order[0])
        taken = machines_of(study.problem, ranking, row)
        replicas = int(ranking.replicas[row])
        dep = assemble.deployment(study, row, replicas, taken)
        mark = (dep.engine, dep.precision, dep.tensor_parallel, dep.pipeline_parallel, dep.offers)
        if mark in seen:
            continue
        seen.add(mark)
        predicted, cost = assemble.predicted(study, row, replicas), assemble.cost(study, row, replicas, taken)
        found.append(Alternative(kind, dep, predicted, cost, words.why_not(study, ranking, row, winner)))
    return tuple(found)


def _no_plan(
    request: ServeRequest, model: ModelSpec, catalog: Catalog, report: SolverReport, excluded: Sequence[Deployment]
) -> Plan:
    """Explain an infeasible request over the widest table: nothing is dropped for being hopeless."""
    study = make_study(request, model, catalog, near_miss=WIDE, excluded=excluded)
    problem, keep, _ = pruned(study)
    core = clashing_limits(problem) if len(problem.rows) else ()
    relaxations: list[Relaxation] = []
    for name in core:
        answer = smallest_relaxation(problem, name)
        if answer is not None and answer.row is not None:
            relaxations.append(words.relaxation(study, name, int(keep[answer.row]), answer))
    relaxations += words.lighter_load(request, model, catalog, core)
    core_words = words.core(study, core) if core else words.nothing_at_all(study)
    return Plan(
        schema_version=SCHEMA_VERSION,
        status="infeasible",
        task="serve",
        request=assemble.request_dict(request),
        assumptions=words.assumptions(study, catalog),
        warnings=(),
        model=assemble.model_summary(model),
        deployment=None,
        memory=None,
        predicted={},
        cost=None,
        solver=report,
        binding=(),
        alternatives=(),
        infeasible=Infeasible(core_words, tuple(relaxations)),
        provenance=assemble.provenance(catalog, ()),
    )


__all__ = ["ALL_LIMITS", "alternatives", "machines_of", "pruned", "solve_serving"]

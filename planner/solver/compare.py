"""Every instance type that can do it, with its best configuration, sorted by the goal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.hardware.records import Catalog
from planner.models.spec import ModelSpec
from planner.plan import Cost, Deployment, MemoryUse, Range
from planner.request import ServeRequest
from planner.solver import assemble, words
from planner.solver.problem import UNBOUNDED, Problem
from planner.solver.ranking import Ranking, rank
from planner.solver.serving import machines_of
from planner.solver.study import Study, make_study


@dataclass(frozen=True)
class Choice:
    """The best configuration on one instance type. fits: keeps every limit; else note says which it breaks and by how much."""

    provider: str
    instance_type: str
    fits: bool
    deployment: Deployment
    memory: MemoryUse
    predicted: dict[str, Range]
    cost: Cost
    note: str


def compare_serving(
    request: ServeRequest, model: ModelSpec, catalog: Catalog, *, near_misses: bool = False
) -> list[Choice]:
    """One choice per instance type (its cheapest region of the request's tiers), best first by the goal.

    near_misses: also types that break exactly one limit, after the others.
    """
    study = make_study(request, model, catalog)
    types: dict[tuple[int, str, str], list[int]] = {}
    for o, (offer, column) in enumerate(zip(study.offers, study.problem.offers, strict=True)):
        types.setdefault((column.hardware, offer.instance.provider, offer.instance.name), []).append(o)
    found: list[tuple[tuple[int, ...], Choice]] = []
    for (hardware, provider, name), offers in types.items():
        rows = np.flatnonzero(study.problem.rows.hardware == hardware)
        if not len(rows):
            continue
        problem = replace(
            study.problem, rows=study.problem.rows.take(rows), offers=tuple(study.problem.offers[o] for o in offers)
        )
        ranking = rank(problem)
        order = ranking.order((ranking.broken_count == 0) & (ranking.cost < UNBOUNDED))
        fits = bool(len(order))
        if not fits and near_misses:
            order = ranking.order(ranking.broken_count == 1)
        if len(order):
            choice = _choice(study, problem, ranking, int(order[0]), int(rows[order[0]]), offers, (provider, name))
            found.append(((0 if fits else 1, *(int(k) for k in ranking.key[order[0]])), choice))
    return [choice for _, choice in sorted(found, key=lambda pair: pair[0])]


def _choice(
    study: Study, problem: Problem, ranking: Ranking, at: int, row: int, offers: list[int], names: tuple[str, str]
) -> Choice:
    taken = {offers[o]: n for o, n in machines_of(problem, ranking, at).items()}
    replicas = int(ranking.replicas[at])
    fits = bool(ranking.broken_count[at] == 0)
    note = "" if fits else words.broken(replace(study, problem=problem), ranking, at)
    return Choice(
        names[0],
        names[1],
        fits,
        assemble.deployment(study, row, replicas, taken),
        assemble.memory_use(study, row),
        assemble.predicted(study, row, replicas),
        assemble.cost(study, row, replicas, taken),
        note,
    )

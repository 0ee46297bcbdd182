"""One configuration: all predictions (estimate) or its memory part by part (memory). Nothing is searched that was pinned."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.errors import InvalidValueError, NoPlanError
from planner.hardware.records import Catalog
from planner.models.spec import ModelSpec
from planner.plan import Cost, Deployment, MemoryUse, Range
from planner.request import Limits, ServeRequest
from planner.solver import assemble, words
from planner.solver.ranking import rank
from planner.solver.serving import WIDE, machines_of
from planner.solver.study import Study, make_study

GIB_KIB = 2**20


@dataclass(frozen=True)
class Estimate:
    """Everything that is predicted for one configuration. fits: the memory suffices; required and capacity in GiB per GPU."""

    deployment: Deployment
    memory: MemoryUse
    fits: bool
    required_gib: float
    capacity_gib: float
    predicted: dict[str, Range]
    cost: Cost
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]


def estimate_serving(request: ServeRequest, model: ModelSpec, catalog: Catalog) -> Estimate:
    """The configuration of the pins on the hardware of the filter; axes left open take their best value for the goal.

    Unpinned precision and KV dtype are those of the checkpoint and 16 bit, not searched. Errors: InvalidValueError when
    no legal configuration is left, NoPlanError when the pinned replicas cannot carry the load.
    """
    pins = request.pins
    pins = replace(pins, precision=pins.precision or model.native_precision)
    loose = replace(request, pins=pins, limits=Limits(max_accuracy_loss_percent=100.0))
    study = make_study(loose, model, catalog, near_miss=WIDE)
    if not len(study.problem.rows):
        raise _nothing(study)
    ranking = rank(study.problem)
    sixteen = np.array([s.kv_dtype.name in ("bf16", "fp16") for s in study.space.shards])[
        np.array([s for s, _ in study.space.pairs], dtype=np.int64)[study.rows.pair[study.placed.row]]
    ]
    plain = sixteen if request.pins.kv_cache_dtype is None and sixteen.any() else np.ones(len(sixteen), dtype=np.bool_)
    fitting = ranking.broken_count == 0
    order = ranking.order(fitting & plain)
    if not len(order):
        missing = study.problem.rows.required_kib - study.problem.rows.capacity_kib
        order = np.flatnonzero(plain)[np.argsort(missing[plain], kind="stable")]
    row = int(order[0])
    taken, replicas = machines_of(study.problem, ranking, row), int(ranking.replicas[row])
    deployed = assemble.deployment(study, row, replicas, taken)
    rows = study.problem.rows
    return Estimate(
        deployed,
        assemble.memory_use(study, row),
        bool(rows.required_kib[row] <= rows.capacity_kib[row]),
        round(int(rows.required_kib[row]) / GIB_KIB, 3),
        round(int(rows.capacity_kib[row]) / GIB_KIB, 3),
        assemble.predicted(study, row, replicas),
        assemble.cost(study, row, replicas, taken),
        words.assumptions(study, catalog),
        words.warnings(study, row, deployed.offers),
    )


def _nothing(study: Study) -> InvalidValueError | NoPlanError:
    reasons = "; ".join(words.nothing_at_all(study))
    if "cannot carry the load" in study.pruned:
        return NoPlanError("this configuration cannot carry the load", reasons, "Add --data-parallel, lower --rate, or leave --data-parallel open.")
    return InvalidValueError("no legal configuration is left", reasons, "Change a pinned axis or the hardware.")

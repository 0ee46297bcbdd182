"""A validated serving plan at its own load: which factors make the estimator give what was measured.

Steps that are f times slower under a rate r are as busy as predicted ones under f r: TPOT = f TPOT0(f r), TTFT = g f TTFT0(f r).
f is solved from the measured TPOT; g is what is left of TTFT after that, so that the two do not act twice near saturation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import log
from typing import Any

import numpy as np

from planner.errors import PlannerError
from planner.estimator.operating_point import MAX_LOAD, IntArray, Pairs, load_per_replica
from planner.hardware.records import Catalog
from planner.models.spec import ModelSpec
from planner.plan import Deployment, Plan
from planner.request import HardwareFilter, Limits, Pins, ServeRequest, Workload
from planner.space.shard import Shard

SAME = 0.02  # a plan whose own prediction is further off (in logarithms) was made by another estimator or model
STEPS = 60
LEAST, MOST = 1e-3, 1e3


@dataclass(frozen=True)
class Point:
    """One replica of a deployment under its load, to be timed with trial factors."""

    pairs: Pairs
    which: IntArray
    load: float
    cap: int

    def times_ms(self, tpot: float, ttft: float) -> tuple[float, float]:
        """(TPOT, TTFT) in ms with these factors; infinite where the load is not carried any more."""
        n = len(self.pairs.shard)
        pairs = replace(self.pairs, speed=np.full(n, tpot), first=np.full(n, ttft))
        time = pairs.time(self.which, np.array([self.load]), np.array([self.cap]))
        return 1e3 * float(time.tpot_s[0]), 1e3 * float(time.ttft_p95_s[0])

    def slowest(self) -> float:
        """The largest factor of TPOT under which the load is still carried (closed loops carry every load)."""
        if self.pairs.workload.concurrency is not None:
            return MOST
        time = self.pairs.time(self.which, np.array([self.load]), np.array([self.cap]))
        return max(1.0, MAX_LOAD * float(time.max_rate_per_s[0]) / self.load)

    def factors(self, measured: Mapping[str, float]) -> dict[str, float]:
        """ln of the factors of tpot_ms and ttft_ms that give these figures, of those that were measured.

        TPOT rises with its factor, so that bisection finds it; a TPOT that no carried load has gives the largest factor.
        """
        found, tpot = {}, 1.0
        if "tpot_ms" in measured:
            low, high = LEAST, min(self.slowest(), MOST)
            for _ in range(STEPS):
                tpot = (low * high) ** 0.5
                low, high = (tpot, high) if self.times_ms(tpot, 1.0)[0] < measured["tpot_ms"] else (low, tpot)
            found["tpot_ms"] = log(tpot)
        if "ttft_ms" in measured:
            found["ttft_ms"] = log(measured["ttft_ms"] / self.times_ms(tpot, 1.0)[1])
        return found


def point_of(plan: Plan, catalog: Catalog, model: ModelSpec, before: Mapping[str, float]) -> Point | None:
    """The plan's deployment at its load; None where the estimator does not give `before` (its predictions without corrections) for it."""
    dep = plan.deployment
    if dep is None or dep.serve is None:
        return None
    request = _request(plan, dep)
    if request.goal == "throughput" and request.workload.concurrency is None:
        return None
    from planner.solver.serving import WIDE
    from planner.solver.study import make_study

    study = make_study(request, model, catalog, near_miss=WIDE)
    for pair in np.unique(study.rows.pair):
        shard, engine = study.pairs.shards[study.pairs.shard[pair]], study.pairs.engines[study.pairs.engine[pair]]
        if engine.name != dep.engine or not _same(shard, dep):
            continue
        load = float(load_per_replica(study.pairs.workload, np.array([dep.data_parallel]))[0])
        point = Point(study.pairs, np.array([pair]), load, dep.serve.max_num_seqs)
        tpot, ttft = point.times_ms(1.0, 1.0)
        now = {"tpot_ms": tpot, "ttft_ms": ttft}
        if all(0 < now[k] < float("inf") and abs(log(now[k] / v)) < SAME for k, v in before.items()):
            return point
    return None


def measured_factors(plan: Plan, catalog: Catalog, measured: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float] | None:  # fmt: skip
    """ln of the factors of a validated plan, by metric; None where its load is not reproduced. before: see point_of."""
    from planner.models import load_model

    try:
        point = point_of(plan, catalog, load_model(str(plan.request.get("model"))), before)
    except (PlannerError, TypeError, LookupError):
        return None
    return None if point is None else point.factors(measured)


def _same(shard: Shard, dep: Deployment) -> bool:
    return (
        shard.gpu.name == dep.offers[0].gpu
        and shard.precision.name == dep.precision
        and shard.kv_dtype.name == dep.kv_cache_dtype
        and shard.tensor_parallel == dep.tensor_parallel
        and shard.pipeline_parallel == dep.pipeline_parallel
        and shard.expert_parallel == dep.expert_parallel
        and dep.serve is not None
        and shard.attention_data_parallel == dep.serve.attention_data_parallel
    )


def _request(plan: Plan, dep: Deployment) -> ServeRequest:
    """The plan's request with the deployment pinned and no limits."""
    tree = plan.request
    pins = Pins(
        **_known(Pins, tree.get("pins"))
        | {
            "engine": dep.engine, "precision": dep.precision, "kv_cache_dtype": dep.kv_cache_dtype,
            "tensor_parallel": dep.tensor_parallel, "pipeline_parallel": dep.pipeline_parallel, "data_parallel": dep.data_parallel,
        }
    )  # fmt: skip
    return ServeRequest(
        str(tree["model"]), tree.get("goal", "cheapest"), Workload(**_known(Workload, tree.get("workload"))),
        Limits(max_accuracy_loss_percent=100.0), HardwareFilter(**_known(HardwareFilter, tree.get("hardware"))), pins,
    )  # fmt: skip


def _known(kind: type, tree: Any) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    values = {k: v for k, v in dict(tree or {}).items() if k in names}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}

"""From a request to a problem: model, offers, space, estimates, integer rows. One study serves solve, compare and explain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from planner.errors import InvalidValueError
from planner.estimator.corrections import MEMORY, correction
from planner.estimator.intervals import margins
from planner.estimator.operating_point import FloatArray, IntArray, Pairs, Settings, take
from planner.estimator.table import NEAR_MISS, PairRows, hopeless, rows_at_saturation, rows_for_load
from planner.hardware.records import Catalog, Offer
from planner.models.precision import precision
from planner.models.spec import ModelSpec
from planner.plan import Deployment
from planner.request import ServeRequest, Workload
from planner.solver.choices import (
    accuracy_loss,
    check_pins,
    check_precisions,
    expert_modes,
    made_while_loading,
    mode_wanted,
    obtainable,
    searched_engines,
    searched_kv_dtypes,
    searched_precisions,
    serving_settings,
)
from planner.solver.exclude import REFUSED, serving_rows_ruled_out
from planner.solver.problem import UNBOUNDED, LimitName, OfferColumn, Problem, Rows, duration_bucket
from planner.space.candidates import Axes, Space, build_space, pinned_rule
from planner.space.hardware_classes import group_offers, offer_limit

if TYPE_CHECKING:
    pass

MAX_THROUGHPUT_REPLICAS = 4096


@dataclass(frozen=True)
class Placed:
    """Rows of pairs placed on hardware classes: candidate and pair-row index of each, equal length."""

    candidate: IntArray
    row: IntArray


OVERLOADED = "cannot carry the load"


@dataclass(frozen=True)
class Study:
    """Everything that is known about a request before the solver runs."""

    request: ServeRequest
    model: ModelSpec
    space: Space
    pairs: Pairs
    rows: PairRows
    placed: Placed
    offers: tuple[Offer, ...]
    problem: Problem
    pruned: dict[str, int]
    capacity_per_s: float = 0.0
    """Most requests/s of a row that cannot carry the load, with all its replicas."""

    @cached_property
    def accuracy_loss_percent(self) -> FloatArray:
        """Expected loss of each shard against the published checkpoint."""
        return np.array([accuracy_loss(self.model, s.precision, s.kv_dtype) for s in self.space.shards])


def find_offers(request: ServeRequest, catalog: Catalog) -> tuple[Offer, ...]:
    """The machines of the request: owned ones, or the catalog's through the filter."""
    from planner.hardware.filters import matching_offers

    return matching_offers(catalog, request.hardware)


def axes_of(model: ModelSpec, request: ServeRequest, near_miss: float) -> Axes:
    """What to search: the pins, the methods, the engines, and the model's own divisibility rules."""
    from planner.estimator.memory.weights import weights_bytes
    from planner.models.limits import (
        fewest_kv_heads,
        pipeline_parallel_problem,
        precision_parallel_problem,
        tensor_parallel_problem,
    )

    pins = request.pins
    methods = searched_precisions(model, pins.precision)
    return Axes(
        methods,
        searched_kv_dtypes(pins.kv_cache_dtype),
        searched_engines(pins.engine),
        pinned_rule(lambda tp: tensor_parallel_problem(model, tp), pins.tensor_parallel),
        pinned_rule(lambda pp: pipeline_parallel_problem(model, pp), pins.pipeline_parallel),
        {p.name: weights_bytes(model, p, 1, 1) for p in methods},
        near_miss,
        weights_bytes(model, precision(model.native_precision), 1, 1),
        lambda engine, p, needs: obtainable(model, request.pins, engine, p, needs),
        lambda tp: [m for m in expert_modes(model, tp) if mode_wanted(m, pins)],
        lambda engine, p, needs: made_while_loading(model, engine, p, needs),
        lambda p, tp, ep: precision_parallel_problem(model, p, tp, ep),
        fewest_kv_heads(model),
        model.is_moe,
        pins.pipeline_parallel is not None,
    )


def make_study(
    request: ServeRequest,
    model: ModelSpec,
    catalog: Catalog,
    near_miss: float = NEAR_MISS,
    *,
    excluded: Sequence[Deployment] = (),
) -> Study:
    """Enumerate, estimate and quantise. near_miss: keep configurations that need up to so many times the memory.

    excluded: deployments that a check refused; they and what puts more on the same GPU are left out.
    """
    check_pins(model, request)
    settings = serving_settings(model, request)
    classes, merged = group_offers(find_offers(request, catalog))
    check_precisions(model, request)
    space = build_space(classes, axes_of(model, request, near_miss))
    pruned: Counter[str] = Counter(space.excluded)
    if len(space):
        pruned["dearer offer of equal hardware"] += merged
    pairs, alive = _estimable(_pairs(model, space, settings, request), near_miss, pruned)
    rows = _operate(pairs, alive, request)
    stable = rows.stable & np.isfinite(rows.e2e_s)
    carried = (rows.max_rate_per_s * rows.replicas)[~stable & np.isfinite(rows.max_rate_per_s)]
    pruned[OVERLOADED] += int(len(alive) - len(np.unique(rows.pair[stable])))
    out = serving_rows_ruled_out(
        pairs.shards, pairs.engines, pairs.shard[rows.pair], pairs.engine[rows.pair], rows.max_num_seqs, excluded
    )
    pruned[REFUSED] += int(out.sum())
    rows = take(rows, stable & ~out)
    placed = place_rows(space, rows)
    offers, columns = offer_columns(space)
    study = Study(request, model, space, pairs, rows, placed, offers, None, {})  # type: ignore[arg-type]
    problem = Problem(request.goal, integer_rows(study), columns, limit_values(request))
    if request.goal == "throughput":
        problem = replace(problem, rows=free_replicas(problem))
    most = float(carried.max(initial=0.0))
    return replace(study, problem=problem, pruned={k: v for k, v in pruned.items() if v}, capacity_per_s=most)


def memory_pairs(request: ServeRequest, model: ModelSpec, catalog: Catalog) -> tuple[Pairs, Space]:
    """The pairs of a request with their memory table and no times, and the space they come from. Nothing is dropped."""
    check_pins(model, request)
    classes, _ = group_offers(find_offers(request, catalog))
    space = build_space(classes, axes_of(model, request, float("inf")))
    return _pairs(model, space, serving_settings(model, request), request), space


def _pairs(model: ModelSpec, space: Space, settings: Settings, request: ServeRequest) -> Pairs:
    """All pairs of the space, with their memory table."""
    from planner.estimator.memory.serving import memory_table

    index = np.array(space.pairs, dtype=np.int64).reshape(-1, 2)
    workload = request.workload
    if request.goal == "throughput" and workload.concurrency is None:
        workload = Workload(workload.input_tokens, workload.output_tokens, None, 1)
    groups = np.array([s.attention_data_parallel for s in space.shards], dtype=np.int64)[index[:, 0]]
    table = memory_table(model, space.shards, space.engines, space.pairs) if len(index) else None
    bad_ends = (
        margins((space.shards[s].gpu, space.engines[e]) for s, e in space.pairs) if request.risk == "low" else None
    )
    speed, first, size = (_factors(space, metric) for metric in ("tpot_ms", "ttft_ms", MEMORY))
    return Pairs(
        model,
        space.shards,
        space.engines,
        index[:, 0],
        index[:, 1],
        settings,
        workload,
        groups,
        table,
        None,
        None,
        bad_ends,
        speed,
        first,
        size,
    )


def _factors(space: Space, metric: str) -> FloatArray | None:
    """Measured / predicted of each pair; None when no GPU of the space was measured."""
    if not any(shard.gpu.corrections for shard in space.shards):
        return None
    return np.array([correction(space.shards[s].gpu, space.engines[e].name, metric).factor for s, e in space.pairs])


def _estimable(pairs: Pairs, near_miss: float, pruned: Counter[str]) -> tuple[Pairs, IntArray]:
    """The pairs with the step table of the shards that are worth timing; positions of those pairs."""
    from planner.estimator.time.steps import step_table

    if not len(pairs.shard):
        return pairs, np.zeros(0, dtype=np.int64)
    dead = hopeless(pairs, near_miss)
    pruned[f"needs more than {near_miss:g} times the memory"] += int(dead.sum())
    alive = np.flatnonzero(~dead)
    used = np.unique(pairs.shard[alive])
    if not len(used):
        return pairs, alive
    position = np.full(len(pairs.shards), -1, dtype=np.int64)
    position[used] = np.arange(len(used))
    shards = tuple(pairs.shards[i] for i in used)
    table = step_table(pairs.model, shards, pairs.workload)
    return pairs.timed(alive, shards, position[pairs.shard], table), alive


def _operate(pairs: Pairs, alive: IntArray, request: ServeRequest) -> PairRows:
    from planner.estimator.table import empty_rows

    if not len(alive):
        return empty_rows()
    if request.goal == "throughput" and request.workload.concurrency is None:
        return rows_at_saturation(pairs, alive, request.limits)
    return rows_for_load(pairs, alive, request.limits, request.goal, request.pins.data_parallel)


def place_rows(space: Space, rows: PairRows) -> Placed:
    """Every row of a pair on every class where the pair has a candidate."""
    pair_of = space.candidate_pair
    order = np.argsort(rows.pair, kind="stable")
    first = np.searchsorted(rows.pair[order], pair_of, side="left")
    count = np.searchsorted(rows.pair[order], pair_of, side="right") - first
    candidate = np.repeat(np.arange(len(pair_of)), count)
    offset = np.arange(len(candidate)) - np.repeat(np.cumsum(count) - count, count)
    return Placed(candidate, order[np.repeat(first, count) + offset] if len(candidate) else np.zeros(0, dtype=np.int64))


def offer_columns(space: Space) -> tuple[tuple[Offer, ...], tuple[OfferColumn, ...]]:
    """The offers in solver order, with their place numbers."""
    places: dict[tuple[str, str], int] = {}
    offers, columns = [], []
    for h, hw in enumerate(space.classes):
        for offer in hw.offers:
            place = places.setdefault((offer.instance.provider, offer.price.region), len(places))
            offers.append(offer)
            columns.append(
                OfferColumn(h, place, round(offer.price.usd_per_hour * 1e6), hw.gpus_per_node, offer_limit(offer))
            )
    return tuple(offers), tuple(columns)


def _microseconds(seconds: FloatArray) -> IntArray:
    return np.ceil(np.minimum(np.nan_to_num(seconds, nan=1e6, posinf=1e6), 1e6) * 1e6 - 1e-6).astype(np.int64)


def integer_rows(study: Study) -> Rows:
    """The placed rows in whole numbers: needs rounded up, capacities down."""
    space, at = study.space, study.placed
    shapes = np.array(
        [(x.replicas_per_node, x.nodes_per_replica, x.tensor_parallel * x.pipeline_parallel) for x in space.layouts],
        dtype=np.int64,
    ).reshape(-1, 3)[space.candidate_layout[at.candidate]]
    rows = take(study.rows, at.row)
    shard_of = np.array([s for s, _ in space.pairs], dtype=np.int64)
    loss = study.accuracy_loss_percent[shard_of[rows.pair]] if len(at.row) else np.zeros(0)
    e2e = _microseconds(rows.e2e_s)
    m = study.pairs.margins
    ttft, tpot, whole, tokens = (
        (1.0, 1.0, 1.0, 1.0)
        if m is None
        else (m.ttft[rows.pair], m.tpot[rows.pair], m.e2e[rows.pair], m.capacity[rows.pair])
    )
    if study.request.goal != "throughput":
        tokens = 1.0  # the load is given: it is carried or not
    return Rows(
        hardware=space.candidate_hardware[at.candidate],
        replicas=rows.replicas,
        replicas_max=rows.replicas,
        replicas_per_node=shapes[:, 0],
        nodes_per_replica=shapes[:, 1],
        gpus_per_replica=shapes[:, 2],
        duration_us=e2e,
        duration_bucket=duration_bucket(e2e),
        tokens_milli_per_s=np.floor(rows.output_tokens_per_s * tokens * 1e3).astype(np.int64),
        metrics={
            "vram": np.ceil((rows.required_bytes - rows.capacity_bytes) / 1024).astype(np.int64),
            "ttft": _microseconds(rows.ttft_p95_s * ttft),
            "tpot": _microseconds(rows.tpot_s * tpot),
            "e2e": _microseconds(rows.e2e_s * whole),
            "max_accuracy_loss": np.rint(loss * 1e4).astype(np.int64),
        },
    )


def limit_values(request: ServeRequest) -> dict[LimitName, int]:
    """The limits in the solver's units, rounded to the safe side. VRAM is always one: nothing may be missing."""
    limits = request.limits
    values: dict[LimitName, float | None] = {
        "vram": 0.0,
        "ttft": None if limits.ttft_s is None else limits.ttft_s * 1e6,
        "tpot": None if limits.tpot_s is None else limits.tpot_s * 1e6,
        "e2e": None if limits.e2e_s is None else limits.e2e_s * 1e6,
        "max_accuracy_loss": limits.max_accuracy_loss_percent * 1e4,
        "budget": None if limits.budget_usd_per_hour is None else limits.budget_usd_per_hour * 1e6,
        "max_gpus": limits.max_gpus,
        "min_throughput": limits.min_throughput_tokens_per_s and -(-limits.min_throughput_tokens_per_s * 1e3 // 1),
    }
    return {name: int(np.floor(value + 1e-6)) for name, value in values.items() if value is not None}


def free_replicas(problem: Problem) -> Rows:
    """Rows of the throughput goal: as many replicas as machines, budget and quotas allow.

    Raises InvalidValueError when nothing bounds them: more machines always give more tokens.
    """
    from planner.solver.constraints import most_machines
    from planner.solver.problem import ALL_LIMITS

    rows = problem.rows
    enforced = frozenset(ALL_LIMITS)
    most = {int(h): most_machines(problem, int(h), enforced) for h in np.unique(rows.hardware)}
    if any(m >= UNBOUNDED for m in most.values()):
        raise InvalidValueError(
            "--goal throughput needs a bound",
            "more machines always give more tokens per second",
            "Add --budget 20/h, --max-gpus 8 or --on 2xrtx-4090.",
        )
    machines = np.array([most[int(h)] for h in rows.hardware], dtype=np.int64)
    room = np.where(
        rows.replicas_per_node >= 1,
        machines * rows.replicas_per_node,
        machines // np.maximum(rows.nodes_per_replica, 1),
    )
    return replace(rows, replicas_max=np.maximum(rows.replicas, np.minimum(room, MAX_THROUGHPUT_REPLICAS)))

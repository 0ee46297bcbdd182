"""From a request to a problem: model, offers, space, estimates, integer rows. One study serves solve, compare and explain."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from planner.engines.formats import checkpoint_for
from planner.engines.records import EngineSpec, engine, engines
from planner.errors import InvalidValueError
from planner.estimator.operating_point import FloatArray, IntArray, Pairs, Settings, take, total_load
from planner.estimator.table import NEAR_MISS, PairRows, hopeless, rows_at_saturation, rows_for_load
from planner.hardware.records import Catalog, Offer
from planner.models.precision import KvDtype, Precision, kv_dtype, kv_dtypes, precision, precisions
from planner.models.spec import ModelSpec
from planner.request import Pins, ServeRequest, Workload
from planner.solver.problem import UNBOUNDED, LimitName, OfferColumn, Problem, Rows, duration_bucket
from planner.space.candidates import Axes, Space, build_space, pinned_rule
from planner.space.hardware_classes import group_offers, offer_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

WORTH_CONVERTING = 0.75
SEARCHED_KV = ("bf16", "fp16", "fp8")
MAX_THROUGHPUT_REPLICAS = 4096


@dataclass(frozen=True)
class Placed:
    """Rows of pairs placed on hardware classes: candidate and pair-row index of each, equal length."""

    candidate: IntArray
    row: IntArray


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

    @cached_property
    def accuracy_loss_percent(self) -> FloatArray:
        """Expected loss of each shard against the published checkpoint."""
        return np.array([accuracy_loss(self.model, s.precision, s.kv_dtype) for s in self.space.shards])


def accuracy_loss(model: ModelSpec, weights: Precision, kv: KvDtype) -> float:
    """Expected loss in percent against the checkpoint as published (a natively quantised model starts at 0)."""
    native = precision(model.native_precision).accuracy_loss_percent
    return max(0.0, weights.accuracy_loss_percent - native) + kv.accuracy_loss_percent


def searched_precisions(model: ModelSpec, pinned: str | None) -> tuple[Precision, ...]:
    """The precisions to search: the published one, and every method that can be applied to it and saves a quarter of its bits.

    fp16 is searched only as the 16-bit fallback of bf16 models on GPUs without bf16 (the engine table decides), or
    when it is pinned.
    """
    if pinned is not None:
        return (precision(pinned),)
    native = precision(model.native_precision)
    smaller = WORTH_CONVERTING * (native.bits + native.overhead_bits)
    found = [
        p
        for p in precisions()
        if p.name == native.name or (p.bits + p.overhead_bits <= smaller and not p.native_only and p.servable)
    ]
    if native.name == "bf16":
        found.append(precision("fp16"))
    return tuple(found)


def searched_kv_dtypes(pinned: str | None) -> tuple[KvDtype, ...]:
    """16 bit and fp8 (e4m3) unless one is pinned."""
    return (kv_dtype(pinned),) if pinned is not None else tuple(k for k in kv_dtypes() if k.name in SEARCHED_KV)


def searched_engines(pinned: str | None) -> tuple[EngineSpec, ...]:
    """All engines unless one is pinned."""
    return (engine(pinned),) if pinned is not None else tuple(engines().values())


def serving_settings(model: ModelSpec, request: ServeRequest) -> Settings:
    """Context and batching of the engine.

    max_model_len: the pin, else room for requests twice as long as the mean, at least 4096, never above the model's.
    """
    w = request.workload
    tokens = w.input_tokens + w.output_tokens
    if tokens > model.max_context:
        raise InvalidValueError(
            f"{w.input_tokens} input + {w.output_tokens} output tokens do not fit the {model.max_context} tokens of context of {model.name}",
            "",
            "Lower --input-tokens or --output-tokens, or choose a model with a longer context.",
        )
    wanted = request.pins.max_model_len
    if wanted is None:
        wanted = min(model.max_context, max(4096, 2 ** int(np.ceil(np.log2(2 * tokens)))))
    elif wanted > model.max_context:
        raise InvalidValueError(
            f"--max-model-len {wanted} is above the {model.max_context} tokens of context of {model.name}",
            "",
            "Lower it.",
        )
    elif wanted < tokens:
        raise InvalidValueError(
            f"--max-model-len {wanted} is below input + output tokens ({tokens})",
            "",
            "Raise it or shorten the workload.",
        )
    return Settings(
        wanted, max_num_batched_tokens=8192, tokens_per_sequence=tokens, max_num_seqs=request.pins.max_num_seqs
    )


def check_pins(model: ModelSpec, request: ServeRequest) -> None:
    """Pinned degrees that the model itself forbids are bad input, with the reason."""
    from planner.models.limits import pipeline_parallel_problem, tensor_parallel_problem

    pins = request.pins
    for flag, value, rule in (
        ("--tensor-parallel", pins.tensor_parallel, tensor_parallel_problem),
        ("--pipeline-parallel", pins.pipeline_parallel, pipeline_parallel_problem),
    ):
        if value is None:
            continue
        if value < 1:
            raise InvalidValueError(f"{flag} must be 1 or more, not {value}", "", f"Write for example {flag} 2.")
        reason = rule(model, value)
        if reason is not None:
            raise InvalidValueError(
                f"{flag} {value} does not work for {model.name}",
                reason,
                "Choose another degree or leave it to the solver.",
            )


def find_offers(request: ServeRequest, catalog: Catalog) -> tuple[Offer, ...]:
    """The machines of the request: owned ones, or the catalog's through the filter."""
    from planner.hardware.filters import matching_offers

    return matching_offers(catalog, request.hardware)


def axes_of(model: ModelSpec, request: ServeRequest, near_miss: float) -> Axes:
    """What to search: the pins, the methods, the engines, and the model's own divisibility rules."""
    from planner.estimator.memory.weights import weights_bytes
    from planner.models.limits import (
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
        lambda tp: expert_modes(model, tp),
        lambda engine, p, needs: made_while_loading(model, engine, p, needs),
        lambda p, tp, ep: precision_parallel_problem(model, p, tp, ep),
    )


def obtainable(model: ModelSpec, pins: Pins, engine: EngineSpec, weights: Precision, needs_checkpoint: bool) -> bool:
    """Can the weights be had in this precision, in a format the engine loads?

    As published; made by the engine while it loads 16-bit weights; or as another published checkpoint of the model. A
    pinned precision, a model without hub id and --unpublished leave finding or making the checkpoint to the user.
    """
    if weights.name == model.native_precision:
        return True
    if not needs_checkpoint:
        return model.native_precision in ("bf16", "fp16", "fp32")
    if pins.precision is not None or pins.unpublished_checkpoints or not model.hf_id:
        return True
    return checkpoint_for(engine.name, model.hf_id, weights.name) is not None


def made_while_loading(model: ModelSpec, engine: EngineSpec, weights: Precision, needs_checkpoint: bool) -> bool:
    """True when the engine converts 16-bit weights: nobody published this precision in a format it loads."""
    if needs_checkpoint or weights.name == model.native_precision:
        return False
    return checkpoint_for(engine.name, model.hf_id, weights.name) is None


def expert_modes(model: ModelSpec, tp: int) -> list[tuple[int, int]]:
    """How a tensor-parallel group may be shared out: (expert_parallel, attention_data_parallel).

    Dense models have one way. Experts may be dealt out whole (expert parallel over the group); then attention may also
    run on every rank with its own sequences, so that a latent or narrow KV cache is not copied to all of them.
    """
    from planner.models.limits import expert_parallel_problem

    if tp == 1 or not model.is_moe or expert_parallel_problem(model, tp) is not None:
        return [(1, 1)]
    return [(1, 1), (tp, 1), (tp, tp)]


def make_study(request: ServeRequest, model: ModelSpec, catalog: Catalog, near_miss: float = NEAR_MISS) -> Study:
    """Enumerate, estimate and quantise. near_miss: keep configurations that need up to so many times the memory."""
    check_pins(model, request)
    settings = serving_settings(model, request)
    classes, merged = group_offers(find_offers(request, catalog))
    space = build_space(classes, axes_of(model, request, near_miss))
    pruned: Counter[str] = Counter(space.excluded)
    pruned["dearer offer of equal hardware"] += merged
    pairs, alive = _estimable(_pairs(model, space, settings, request), near_miss, pruned)
    rows = _operate(pairs, alive, request)
    stable = rows.stable & np.isfinite(rows.e2e_s)
    pruned["cannot carry the load"] += int(len(alive) - len(np.unique(rows.pair[stable])))
    rows = take(rows, stable)
    placed = place_rows(space, rows)
    offers, columns = offer_columns(space)
    study = Study(request, model, space, pairs, rows, placed, offers, None, {})  # type: ignore[arg-type]
    problem = Problem(request.goal, integer_rows(study), columns, limit_values(request))
    if request.goal == "throughput":
        problem = replace(problem, rows=free_replicas(problem))
    return replace(study, problem=problem, pruned={k: v for k, v in pruned.items() if v})


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
    return Pairs(
        model, space.shards, space.engines, index[:, 0], index[:, 1], settings, workload, groups, table, None, None
    )


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
    return Rows(
        hardware=space.candidate_hardware[at.candidate],
        replicas=rows.replicas,
        replicas_max=rows.replicas,
        replicas_per_node=shapes[:, 0],
        nodes_per_replica=shapes[:, 1],
        gpus_per_replica=shapes[:, 2],
        duration_us=e2e,
        duration_bucket=duration_bucket(e2e),
        tokens_milli_per_s=np.floor(rows.output_tokens_per_s * 1e3).astype(np.int64),
        metrics={
            "vram": np.ceil((rows.required_bytes - rows.capacity_bytes) / 1024).astype(np.int64),
            "ttft": _microseconds(rows.ttft_p95_s),
            "tpot": _microseconds(rows.tpot_s),
            "e2e": e2e,
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


def describe_load(request: ServeRequest) -> str:
    """The load in words."""
    w = request.workload
    if w.concurrency is not None:
        return f"{w.concurrency} users, each with one request in flight"
    return f"{total_load(w):g} requests/s"


def shard_positions(study: Study, which: Sequence[int]) -> list[int]:
    """Shard index in the space for pair indices."""
    return [study.space.pairs[p][0] for p in which]

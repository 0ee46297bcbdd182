"""From a training request to a problem: hardware in the order of its cost bound, estimates, integer rows.

Hardware that cannot beat the best answer found so far, even at the highest utilisation any kernel reaches, is not
estimated; the bound is part of the proof.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.engines.training import Framework, framework, frameworks
from planner.errors import InvalidValueError
from planner.estimator.cost.training import run_cost_usd, run_steps, run_time_s
from planner.estimator.memory.training import TrainMemory, training_memory
from planner.estimator.operating_point import BoolArray, FloatArray, IntArray, take
from planner.estimator.time.training import TrainTime, training_time
from planner.hardware.records import Catalog, Offer
from planner.models.spec import ModelSpec
from planner.plan import Deployment
from planner.request import TrainRequest
from planner.solver.exclude import REFUSED, training_rows_ruled_out
from planner.solver.problem import TIE_PERCENT, LimitName, OfferColumn, Problem, Rows, duration_bucket
from planner.space.hardware_classes import HardwareClass, group_offers, offer_limit
from planner.space.train_candidates import enumerate_rows, machine_counts
from planner.space.train_rows import TrainRows
from planner.units import GIB, TERA

MAX_UTILISATION = 0.9
MAX_GPUS = 2048
NEAR_MISS = 1.25
LONGEST_US = 10**13
NOT_IN_TIME = "hardware not estimated before the time limit"


@dataclass(frozen=True)
class Block:
    """The rows of one class and machine count that were estimated (equal-length columns)."""

    hardware: int
    machines: int
    rows: TrainRows
    memory: TrainMemory
    time: TrainTime
    run_s: FloatArray

    def __len__(self) -> int:
        return len(self.run_s)


@dataclass(frozen=True)
class TrainStudy:
    """Everything known before the solver runs. block_of, position: where each problem row comes from."""

    request: TrainRequest
    model: ModelSpec
    frameworks: tuple[Framework, ...]
    classes: tuple[HardwareClass, ...]
    blocks: tuple[Block, ...]
    offers: tuple[Offer, ...]
    problem: Problem
    block_of: IntArray
    position: IntArray
    candidates: int
    pruned: dict[str, int]


def training_flops(model: ModelSpec, request: TrainRequest) -> float:
    """A lower bound of the FLOPs of the run: 6 per active weight and token (4 with frozen weights), attention left out."""
    passes = 6.0 if request.job.method == "full" else 4.0
    weights = model.params_active - model.vocab * model.hidden
    return passes * weights * request.job.tokens


def least_seconds(model: ModelSpec, request: TrainRequest, hw: HardwareClass, machines: int) -> float:
    """The run at MAX_UTILISATION of the dense peak: no configuration on this hardware is faster."""
    dtype = request.job.precision if request.job.precision in hw.gpu.peak_tflops else "fp16"
    peak = hw.gpu.peak_tflops.get(dtype, 0.0) * TERA
    if peak <= 0:
        return float("inf")
    return training_flops(model, request) / (machines * hw.gpus_per_node * peak * MAX_UTILISATION)


def cheapest_usd_per_hour(hw: HardwareClass) -> float:
    """Least price of one machine of the class."""
    return min(o.price.usd_per_hour for o in hw.offers)


def bound(request: TrainRequest, model: ModelSpec, hw: HardwareClass, machines: int) -> float:
    """What the goal cannot go below on this hardware: USD of the run for `cheapest`, its seconds else."""
    seconds = least_seconds(model, request, hw, machines)
    return seconds / 3600 * machines * cheapest_usd_per_hour(hw) if request.goal == "cheapest" else seconds


def placements(
    request: TrainRequest, model: ModelSpec, classes: Sequence[HardwareClass]
) -> list[tuple[float, int, int]]:
    """(bound, class, machines) of everything that is not hopeless by its bound, most promising first."""
    found = []
    most = min(request.limits.max_gpus or MAX_GPUS, MAX_GPUS)
    for h, hw in enumerate(classes):
        limits = [offer_limit(o) for o in hw.offers]
        limit = None if any(n is None for n in limits) else max(n for n in limits if n is not None)
        for machines in machine_counts(limit, hw.gpus_per_node, most):
            if machines > 1 and hw.fabric is None:
                continue
            found.append((bound(request, model, hw, machines), h, machines))
    return sorted(found, key=lambda p: (p[0], p[2], p[1]))


def find_train_offers(request: TrainRequest, catalog: Catalog) -> tuple[Offer, ...]:
    """The machines of the request: owned ones, or the catalog's through the filter."""
    from planner.hardware.filters import matching_offers

    return matching_offers(catalog, request.hardware)


def check_job(request: TrainRequest, model: ModelSpec) -> None:
    """What no hardware could mend is bad input: unknown framework, sequences beyond the context, impossible degrees."""
    from planner.models.limits import pipeline_parallel_problem, tensor_parallel_problem

    pins = request.pins
    if pins.framework is not None:
        framework(pins.framework)
    if request.job.seq_len > model.max_context:
        raise InvalidValueError(
            f"--seq-len {request.job.seq_len} is above the {model.max_context} tokens of context of {model.name}",
            "",
            "Lower it, or choose a model with a longer context.",
        )
    for flag, value, rule in (
        ("--tensor-parallel", pins.tensor_parallel, tensor_parallel_problem),
        ("--pipeline-parallel", pins.pipeline_parallel, pipeline_parallel_problem),
    ):
        reason = None if value is None else rule(model, value)
        if reason is not None:
            raise InvalidValueError(
                f"{flag} {value} does not work for {model.name}", reason, "Choose another degree or leave it open."
            )


def make_train_study(
    request: TrainRequest,
    model: ModelSpec,
    catalog: Catalog,
    near_miss: float = NEAR_MISS,
    *,
    per_class: bool = False,
    explain: bool = False,
    excluded: Sequence[Deployment] = (),
) -> TrainStudy:
    """Estimate hardware in the order of its bound until no other can win; quantise what was estimated.

    per_class: find the best of every class instead of the best of all (compare). For `fastest` hardware is kept while
    its bound is within a tie of the best. Hardware whose turn comes after request.time_limit_s is counted as NOT_IN_TIME.
    Hardware whose bound breaks the limit on the goal itself (the budget of `cheapest`, the deadline of `fastest`) is left out; to
    explain why nothing is feasible, what is nearest to that limit is found too. excluded: deployments that a check refused; they
    and what puts more on the same GPU are left out.
    """
    if request.goal == "throughput":
        raise InvalidValueError(
            "--goal throughput is for serving", "a training run has an end", "Use --goal fastest or --goal cheapest."
        )
    check_job(request, model)
    classes, merged = group_offers(find_train_offers(request, catalog))
    stacks = tuple(frameworks().values())
    pruned: Counter[str] = Counter({"dearer offer of equal hardware": merged})
    blocks: list[Block] = []
    best: dict[int, float] = {}
    seen = 0
    slack = 1 + (TIE_PERCENT / 100 if request.goal == "fastest" else 1e-9)
    ceiling, judged = _goal_limit(request)
    judged = judged if explain else request
    end = time.perf_counter() + request.time_limit_s
    for low, h, machines in placements(request, model, classes):
        group = h if per_class else -1
        if low > ceiling and not per_class and not explain:
            pruned["hardware and machine count whose bound breaks the limit on the goal"] += 1
            continue
        if low > max(best.get(group, np.inf), ceiling if explain and ceiling < np.inf else 0.0) * slack:
            pruned["hardware and machine count whose bound is above the best answer"] += 1
            continue
        if time.perf_counter() > end:
            pruned[NOT_IN_TIME] += 1
            continue
        block, count = _estimate_block(request, model, (h, classes[h], machines), stacks, near_miss, pruned, excluded)
        seen += count
        if block is None:
            continue
        blocks.append(block)
        best[group] = min(best.get(group, np.inf), _best_value(judged, classes[h], block))
    return _quantise(request, model, stacks, classes, blocks, seen, pruned)


def _goal_limit(request: TrainRequest) -> tuple[float, TrainRequest]:
    """The limit in the measure of the goal (infinite when there is none), and the request without it."""
    limits = request.limits
    if request.goal == "cheapest":
        value, rest = limits.budget_usd, replace(limits, budget_usd=None)
    else:
        value, rest = limits.deadline_s, replace(limits, deadline_s=None)
    if value is None:
        return float("inf"), request
    return value, replace(request, limits=rest)


def _estimate_block(
    request: TrainRequest,
    model: ModelSpec,
    where: tuple[int, HardwareClass, int],
    stacks: tuple[Framework, ...],
    near_miss: float,
    pruned: Counter[str],
    excluded: Sequence[Deployment] = (),
) -> tuple[Block | None, int]:
    """Memory of all rows, time of those that nearly fit; the rows of the block that are worth keeping."""
    h, hw, machines = where
    rows, illegal = enumerate_rows(model, request.job, hw, machines, stacks, request.pins)
    pruned["illegal layout"] += illegal
    if not len(rows):
        return None, illegal
    memory = training_memory(model, request.job, hw, stacks, rows)
    near = memory.peak_bytes <= near_miss * memory.usable_bytes
    pruned[f"needs more than {near_miss:g} times the memory"] += int((~near).sum())
    out = near & training_rows_ruled_out(hw.gpu.name, stacks, rows, excluded)
    pruned[REFUSED] += int(out.sum())
    near &= ~out
    if not near.any():
        return None, illegal + len(rows)
    kept = np.flatnonzero(near)
    timing = training_time(model, request.job, hw, stacks, rows.take(kept))
    batch = rows.micro_batch_size * rows.data_parallel * rows.gradient_accumulation_steps
    run_s = run_time_s(run_steps(request.job, batch[kept]), timing.step_time_s)
    block = Block(h, machines, rows.take(kept), take(memory, kept), timing, run_s)
    front = _front(request, hw, block)
    pruned["dominated by a better layout of the same machines"] += len(block) - len(front)
    return _take_block(block, front), illegal + len(rows)


def _take_block(block: Block, at: IntArray) -> Block:
    return Block(
        block.hardware,
        block.machines,
        block.rows.take(at),
        take(block.memory, at),
        take(block.time, at),
        block.run_s[at],
    )


def missing_kib(block: Block) -> IntArray:
    """GPU memory that each row lacks, in KiB."""
    return np.maximum(np.ceil((block.memory.peak_bytes - block.memory.usable_bytes) / 1024), 0).astype(np.int64)


def missing_host_kib(hw: HardwareClass, block: Block) -> IntArray:
    """Host memory that each row lacks on the class's best-equipped machine, in KiB; 0 where nobody states the RAM."""
    rams = [o.instance.ram_gib for o in hw.offers]
    if any(r is None for r in rams):
        return np.zeros(len(block), dtype=np.int64)
    most = max(float(r) for r in rams if r is not None) * GIB
    return np.maximum(np.ceil((block.memory.host_ram_bytes - most) / 1024), 0).astype(np.int64)


def _front(request: TrainRequest, hw: HardwareClass, block: Block) -> IntArray:
    """Rows worth keeping: the fastest that keeps memory and step time, for each framework; and the faster ones that miss
    just one of GPU memory, host memory and step time, as long as each misses it by less than all faster ones."""
    order = np.argsort(block.run_s, kind="stable")
    misses = [missing_kib(block)[order], missing_host_kib(hw, block)[order], np.zeros(len(block), dtype=np.int64)]
    if request.limits.step_s is not None:
        misses[2] = np.maximum(np.ceil((block.time.step_time_s - request.limits.step_s) * 1e6), 0).astype(np.int64)[
            order
        ]
    count = np.sum([m > 0 for m in misses], axis=0)
    kept: list[IntArray] = []
    fitting = np.flatnonzero(count == 0)
    stacks = block.rows.framework[order[fitting]]
    kept.append(fitting[np.unique(stacks, return_index=True)[1]])
    first = int(fitting[0]) if len(fitting) else len(order)
    for miss in misses:
        alone = np.flatnonzero((count == 1) & (miss > 0) & (np.arange(len(order)) < first))
        before = np.minimum.accumulate(miss[alone]) if len(alone) else miss[alone]
        kept.append(alone[np.concatenate([[True], miss[alone][1:] < before[:-1]])] if len(alone) else alone)
    if not len(fitting):
        kept.append(np.array([int(np.lexsort((np.arange(len(order)), misses[0]))[0])]))
    return np.unique(np.concatenate([order[k] for k in kept]))


def _best_value(request: TrainRequest, hw: HardwareClass, block: Block) -> float:
    """The best goal value in the block that keeps all limits; infinite when none does."""
    limits = request.limits
    good: BoolArray = (missing_kib(block) == 0) & (missing_host_kib(hw, block) == 0)
    hourly = block.machines * cheapest_usd_per_hour(hw)
    usd = run_cost_usd(block.run_s, hourly)
    if limits.deadline_s is not None:
        good &= block.run_s <= limits.deadline_s
    if limits.step_s is not None:
        good &= block.time.step_time_s <= limits.step_s
    if limits.budget_usd is not None:
        good &= usd <= limits.budget_usd
    if limits.budget_usd_per_hour is not None and hourly > limits.budget_usd_per_hour:
        return float("inf")
    value = usd if request.goal == "cheapest" else block.run_s
    return float(value[good].min()) if good.any() else float("inf")


def _quantise(
    request: TrainRequest,
    model: ModelSpec,
    stacks: tuple[Framework, ...],
    classes: tuple[HardwareClass, ...],
    blocks: list[Block],
    seen: int,
    pruned: Counter[str],
) -> TrainStudy:
    """Integer rows: each block once per offer of its class, with the cost of the run there."""
    offers: list[Offer] = []
    columns: list[OfferColumn] = []
    places: dict[tuple[str, str], int] = {}
    of_class: dict[int, list[int]] = {}
    for h in sorted({b.hardware for b in blocks}):
        for offer in classes[h].offers:
            place = places.setdefault((offer.instance.provider, offer.price.region), len(places))
            of_class.setdefault(h, []).append(len(offers))
            columns.append(
                OfferColumn(
                    len(offers),
                    place,
                    round(offer.price.usd_per_hour * 1e6),
                    classes[h].gpus_per_node,
                    offer_limit(offer),
                )
            )
            offers.append(offer)
    parts = [_block_rows(block, o, offers[o], b) for b, block in enumerate(blocks) for o in of_class[block.hardware]]
    if not parts:
        empty = np.zeros(0, dtype=np.int64)
        rows = Rows(empty, empty, empty, empty, empty, empty, empty, empty, empty, {}, empty)
        problem = Problem(request.goal, rows, (), train_limits(request))
        return TrainStudy(request, model, stacks, classes, (), (), problem, empty, empty, seen, dict(pruned))
    rows = _concatenate([p[0] for p in parts])
    return TrainStudy(
        request,
        model,
        stacks,
        classes,
        tuple(blocks),
        tuple(offers),
        Problem(request.goal, rows, tuple(columns), train_limits(request)),
        np.concatenate([p[1] for p in parts]),
        np.concatenate([np.arange(len(p[0])) for p in parts]),
        seen,
        {k: v for k, v in pruned.items() if v},
    )


def _block_rows(block: Block, o: int, offer: Offer, number: int) -> tuple[Rows, IntArray]:
    n = len(block)
    duration = np.minimum(np.ceil(block.run_s * 1e6), LONGEST_US).astype(np.int64)
    ones = np.ones(n, dtype=np.int64)
    ram = offer.instance.ram_gib
    host = np.zeros(n) if ram is None else (block.memory.host_ram_bytes - ram * GIB) / 1024
    rows = Rows(
        hardware=o * ones,
        replicas=ones,
        replicas_max=ones,
        replicas_per_node=0 * ones,
        nodes_per_replica=block.machines * ones,
        gpus_per_replica=block.rows.world,
        duration_us=duration,
        duration_bucket=duration_bucket(duration),
        tokens_milli_per_s=np.floor(block.time.tokens_per_s * 1e3).astype(np.int64),
        metrics={
            "vram": np.ceil((block.memory.peak_bytes - block.memory.usable_bytes) / 1024).astype(np.int64),
            "host_ram": np.ceil(host).astype(np.int64),
            "step_time": np.ceil(block.time.step_time_s * 1e6).astype(np.int64),
            "deadline": duration,
        },
        run_cost=np.ceil(run_cost_usd(duration / 1e6, block.machines * offer.price.usd_per_hour) * 1e6).astype(
            np.int64
        ),
    )
    return rows, number * ones


def _concatenate(parts: list[Rows]) -> Rows:
    from dataclasses import fields

    arrays = {
        f.name: np.concatenate([getattr(p, f.name) for p in parts])
        for f in fields(Rows)
        if f.name not in ("metrics", "run_cost")
    }
    costs = [p.run_cost for p in parts if p.run_cost is not None]
    return Rows(
        **arrays,
        metrics={k: np.concatenate([p.metrics[k] for p in parts]) for k in parts[0].metrics},
        run_cost=np.concatenate(costs),
    )


def train_limits(request: TrainRequest) -> dict[LimitName, int]:
    """The limits in the solver's units. GPU and host memory are always limits: nothing may be missing."""
    limits = request.limits
    values: dict[LimitName, float | None] = {
        "vram": 0.0,
        "host_ram": 0.0,
        "step_time": None if limits.step_s is None else limits.step_s * 1e6,
        "deadline": None if limits.deadline_s is None else limits.deadline_s * 1e6,
        "budget": None if limits.budget_usd is None else limits.budget_usd * 1e6,
        "budget_per_hour": None if limits.budget_usd_per_hour is None else limits.budget_usd_per_hour * 1e6,
        "max_gpus": limits.max_gpus,
    }
    return {name: int(np.floor(value + 1e-6)) for name, value in values.items() if value is not None}


__all__ = ["Block", "TrainStudy", "make_train_study", "train_limits"]

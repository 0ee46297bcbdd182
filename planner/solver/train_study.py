"""From a training request to a problem: hardware in the order of its cost bound, until no other can win.

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
from planner.estimator.operating_point import IntArray
from planner.hardware.records import Catalog, Offer
from planner.models.flops import least_training_flops
from planner.models.spec import ModelSpec
from planner.plan import Deployment
from planner.request import TrainRequest
from planner.solver.problem import TIE_PERCENT, LimitName, Problem
from planner.solver.train_block import ENDLESS, NEAR_MISS, NOT_IN_TIME, estimate_block
from planner.solver.train_integers import quantise
from planner.solver.train_site import LONGEST_S, Block, Site, best_value, cheapest_usd_per_hour
from planner.space.hardware_classes import HardwareClass, group_offers, offer_limit
from planner.space.train_candidates import machine_counts
from planner.units import TERA

MAX_UTILISATION = 0.9
MAX_GPUS = 2048
DEARER = (
    "dearer offer of equal hardware"  # left out beside one that can do the same: never the reason that there is no plan
)


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


def least_seconds(model: ModelSpec, request: TrainRequest, hw: HardwareClass, machines: int) -> float:
    """The run at MAX_UTILISATION of the dense peak: no configuration on this hardware is faster."""
    dtype = request.job.precision if request.job.precision in hw.gpu.peak_tflops else "fp16"
    peak = hw.gpu.peak_tflops.get(dtype, 0.0) * TERA
    if peak <= 0:
        return float("inf")
    return least_training_flops(model, request.job.tokens, request.job.method == "full") / (
        machines * hw.gpus_per_node * peak * MAX_UTILISATION
    )


def bound(request: TrainRequest, model: ModelSpec, hw: HardwareClass, machines: int) -> float:
    """What the goal cannot go below on this hardware: USD of the run for `cheapest`, its seconds else."""
    seconds = least_seconds(model, request, hw, machines)
    return seconds / 3600 * machines * cheapest_usd_per_hour(hw) if request.goal == "cheapest" else seconds


def bounds(request: TrainRequest, model: ModelSpec, classes: Sequence[HardwareClass]) -> tuple[float, float]:
    """(seconds, USD) that no run of the request goes below on any of its hardware; infinite where there is none."""
    found = [(h, n) for _, h, n in placements(request, model, classes)]
    seconds = [least_seconds(model, request, classes[h], n) for h, n in found]
    usd = [s / 3600 * n * cheapest_usd_per_hour(classes[h]) for s, (h, n) in zip(seconds, found, strict=True)]
    return min(seconds, default=float("inf")), min(usd, default=float("inf"))


def beyond_bounds(request: TrainRequest, found: tuple[float, float]) -> tuple[LimitName, ...]:
    """Limits that the bounds (seconds, USD) prove impossible, each by itself."""
    limits: tuple[tuple[LimitName, float, float | None], ...] = (
        ("deadline", found[0], request.limits.deadline_s),
        ("budget", found[1], request.limits.budget_usd),
    )
    return tuple(name for name, least, limit in limits if limit is not None and least > limit)


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

    per_class: find the best of every class instead of the best of all (compare). explain: find what is nearest to the
    limit on the goal too, to say why nothing is feasible. Hardware whose turn comes after request.time_limit_s is
    counted as NOT_IN_TIME. excluded: deployments that a check refused; they and what puts more on the same GPU are left out.
    """
    if request.goal == "throughput":
        raise InvalidValueError(
            "--goal throughput is for serving", "a training run has an end", "Use --goal fastest or --goal cheapest."
        )
    check_job(request, model)
    ends = time.perf_counter() + request.time_limit_s
    classes, merged = group_offers(find_train_offers(request, catalog), host_memory=True)
    stacks = tuple(frameworks().values())
    pruned: Counter[str] = Counter({DEARER: merged})
    hurdle = _Hurdle.of(request, per_class, explain)
    blocks: list[Block] = []
    seen = 0
    impossible = not explain and beyond_bounds(request, bounds(request, model, classes))
    for low, h, machines in placements(request, model, classes):
        hopeless = hurdle.hopeless(low, h) or (NOT_IN_TIME if time.perf_counter() > ends else None)
        if least_seconds(model, request, classes[h], machines) > LONGEST_S:
            hopeless = ENDLESS
        elif impossible:
            hopeless = f"hardware and machine count whose bound breaks the {' and the '.join(impossible)}"
        if hopeless is not None:
            pruned[hopeless] += 1
            continue
        site = Site(request, model, stacks, h, classes[h], machines, near_miss, hurdle.height(h), ends, tuple(excluded))
        block, count = estimate_block(site, pruned)
        seen += count
        if block is not None:
            blocks.append(block)
            hurdle.lower(h, best_value(hurdle.judged, classes[h], block))
    found = quantise(request, classes, blocks)
    counts = {k: v for k, v in pruned.items() if v}
    places = (found.problem, found.block_of, found.position)
    return TrainStudy(request, model, stacks, classes, tuple(blocks), found.offers, *places, seen, counts)


@dataclass
class _Hurdle:
    """What the bound of hardware must stay under to be looked at: the best answer so far, or the limit on the goal.

    One best of all, or (per_class) one of each class. For `fastest` hardware is kept while its bound is within a tie of
    the best. ceiling: hardware whose bound is above it breaks the limit on the goal; None = such hardware is estimated too,
    reach: at least up to that limit, since answers beyond it do not count as best.
    """

    judged: TrainRequest
    slack: float
    ceiling: float | None
    reach: float
    per_class: bool
    best: dict[int, float]

    @classmethod
    def of(cls, request: TrainRequest, per_class: bool, explain: bool) -> _Hurdle:
        """The hurdle before anything is estimated."""
        slack = 1 + (TIE_PERCENT / 100 if request.goal == "fastest" else 1e-9)
        limit, without = _goal_limit(request)
        if explain:
            return cls(without, slack, None, limit if limit < np.inf else 0.0, per_class, {})
        return cls(request, slack, None if per_class else limit, 0.0, per_class, {})

    def height(self, hardware: int) -> float:
        """The goal value above which nothing on this hardware can be the answer."""
        best = self.best.get(hardware if self.per_class else -1, np.inf)
        return float(max(best, self.reach) * self.slack)

    def hopeless(self, low: float, hardware: int) -> str | None:
        """Why hardware of this bound need not be looked at; None when it must."""
        if self.ceiling is not None and low > self.ceiling:
            return "hardware and machine count whose bound breaks the limit on the goal"
        if low > self.height(hardware):
            return "hardware and machine count whose bound is above the best answer"
        return None

    def lower(self, hardware: int, value: float) -> None:
        """A new answer of that goal value on that hardware."""
        group = hardware if self.per_class else -1
        self.best[group] = min(self.best.get(group, np.inf), value)


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

"""One class of hardware at one machine count: what is estimated there, what its layouts break, which are worth keeping."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planner.engines.training import Framework
from planner.estimator.corrections import corrected_training_memory, corrected_training_time
from planner.estimator.cost.training import run_cost_usd, run_steps, run_time_s
from planner.estimator.intervals import training_margins
from planner.estimator.memory.training import TrainMemory, training_memory
from planner.estimator.operating_point import BoolArray, FloatArray, IntArray, take
from planner.estimator.time.training import TrainTime, training_time
from planner.estimator.train_stages import Cut
from planner.models.spec import ModelSpec
from planner.plan import Deployment
from planner.request import TrainRequest
from planner.space.hardware_classes import HardwareClass
from planner.space.train_rows import TrainRows
from planner.units import GIB

LONGEST_S = 10 * 365.25 * 86400.0  # a run beyond is no answer, and its cost in micro-USD would not be safe to add up


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

    def take(self, at: IntArray | BoolArray) -> Block:
        """The rows at `at` (positions or a mask)."""
        memory, timing = take(self.memory, at), take(self.time, at)
        return Block(self.hardware, self.machines, self.rows.take(at), memory, timing, self.run_s[at])


@dataclass(frozen=True)
class Site:
    """Where and what is estimated: one class of hardware, a machine count, the request on it.

    worth: the goal value (USD or seconds of the run) above which no answer is sought. ends: time.perf_counter. excluded:
    deployments that a check refused.
    """

    request: TrainRequest
    model: ModelSpec
    stacks: tuple[Framework, ...]
    hardware: int
    hw: HardwareClass
    machines: int
    near_miss: float
    worth: float
    ends: float
    excluded: tuple[Deployment, ...] = ()

    def goal_value(self, run_s: FloatArray) -> FloatArray:
        """What the goal counts, at the least price: USD of the run for `cheapest`, its seconds else."""
        hourly = self.machines * cheapest_usd_per_hour(self.hw)
        return run_cost_usd(run_s, hourly) if self.request.goal == "cheapest" else run_s

    @cached_property
    def margins(self) -> tuple[FloatArray, FloatArray]:
        """Factors (F,) of time and of peak memory that limits are held against, by framework."""
        found = [
            training_margins(self.request.risk, self.hw.gpu, self.model.is_moe, stack.name) for stack in self.stacks
        ]
        return np.array([f[0] for f in found]), np.array([f[1] for f in found])

    def memory(self, rows: TrainRows, cut: Cut = "split") -> TrainMemory:
        """Memory of rows here; the peak is the one that the limit is held against."""
        found = training_memory(self.model, self.request.job, self.hw, self.stacks, rows, cut=cut)
        found = corrected_training_memory(found, self.hw.gpu, self.stacks, rows)
        if self.request.risk == "high":
            return found
        return replace(found, peak_bytes=found.peak_bytes * self.margins[1][rows.framework])

    def timed(self, rows: TrainRows, memory: TrainMemory, cut: Cut = "split") -> Block:
        """Rows with their time."""
        job = self.request.job
        timing = training_time(self.model, job, self.hw, self.stacks, rows, cut=cut)
        timing = corrected_training_time(timing, self.hw.gpu, self.stacks, rows)
        if self.request.risk == "low":
            timing = replace(timing, step_time_s=timing.step_time_s * self.margins[0][rows.framework])
        batch = rows.micro_batch_size * rows.data_parallel * rows.gradient_accumulation_steps
        run_s = run_time_s(run_steps(job, batch), timing.step_time_s)
        return Block(self.hardware, self.machines, rows, memory, timing, run_s)


def misses(site: Site, block: Block) -> IntArray:
    """By how much each row breaks GPU memory (KiB), host memory (KiB) and step time (us), (3, N)."""
    late = np.zeros(len(block), dtype=np.int64)
    if site.request.limits.step_s is not None:
        over = (block.time.step_time_s - site.request.limits.step_s) * 1e6
        late = np.maximum(np.ceil(over), 0).astype(np.int64)
    return np.stack([missing_kib(block), missing_host_kib(site.hw, block), late])


def missing_kib(block: Block) -> IntArray:
    """GPU memory that each row lacks, in KiB."""
    return np.maximum(np.ceil((block.memory.peak_bytes - block.memory.usable_bytes) / 1024), 0).astype(np.int64)


def missing_host_kib(hw: HardwareClass, block: Block) -> IntArray:
    """Host memory that each row lacks on the class's least equipped machine, in KiB; 0 where nobody states the RAM.

    Those that fit a better equipped one are among the rows that lack it alone, each less than all faster ones (`useful`).
    """
    rams = [float(o.host_ram_gib) for o in hw.offers if o.host_ram_gib is not None]
    least = min(rams, default=np.inf) * GIB
    return np.maximum(np.ceil((block.memory.host_ram_bytes - least) / 1024), 0).astype(np.int64)


def usd_per_hour_by_row(hw: HardwareClass, block: Block) -> FloatArray:
    """Least price of one machine with the host memory that each row needs; infinite where none has it."""
    found = np.full(len(block), np.inf)
    for offer in hw.offers:
        ram = np.inf if offer.host_ram_gib is None else offer.host_ram_gib * GIB
        found = np.where(block.memory.host_ram_bytes <= ram, np.minimum(found, offer.price.usd_per_hour), found)
    return found


def useful_rows(site: Site, block: Block) -> IntArray:
    """Rows worth keeping: the fastest that keeps memory and step time, for each framework; and the faster ones that miss
    just one of GPU memory, host memory and step time, as long as each misses it by less than all faster ones."""
    return useful(block.run_s, misses(site, block), block.rows.framework)


def useful(run_s: FloatArray, over: IntArray, stacks: IntArray) -> IntArray:
    """useful_rows of runs (N,), misses (3, N) and frameworks (N,)."""
    order = np.argsort(run_s, kind="stable")
    over = over[:, order]
    count = (over > 0).sum(0)
    kept: list[IntArray] = []
    fitting = np.flatnonzero(count == 0)
    kept.append(fitting[np.unique(stacks[order[fitting]], return_index=True)[1]])
    first = int(fitting[0]) if len(fitting) else len(order)
    for miss in over:
        alone = np.flatnonzero((count == 1) & (miss > 0) & (np.arange(len(order)) < first))
        before = np.minimum.accumulate(miss[alone]) if len(alone) else miss[alone]
        kept.append(alone[np.concatenate([[True], miss[alone][1:] < before[:-1]])] if len(alone) else alone)
    if not len(fitting) and len(order):
        kept.append(np.array([int(np.lexsort((np.arange(len(order)), over[0]))[0])]))
    return np.unique(np.concatenate([order[k] for k in kept]))


def cheapest_usd_per_hour(hw: HardwareClass) -> float:
    """Least price of one machine of the class."""
    return min(o.price.usd_per_hour for o in hw.offers)


def best_value(request: TrainRequest, hw: HardwareClass, block: Block) -> float:
    """The best goal value in the block that keeps all limits; infinite when none does."""
    limits = request.limits
    hourly = block.machines * usd_per_hour_by_row(hw, block)
    good: BoolArray = (missing_kib(block) == 0) & np.isfinite(hourly)
    usd = run_cost_usd(block.run_s, hourly)
    if limits.deadline_s is not None:
        good &= block.run_s <= limits.deadline_s
    if limits.step_s is not None:
        good &= block.time.step_time_s <= limits.step_s
    if limits.budget_usd is not None:
        good &= usd <= limits.budget_usd
    if limits.budget_usd_per_hour is not None:
        good &= hourly <= limits.budget_usd_per_hour
    value = usd if request.goal == "cheapest" else block.run_s
    return float(value[good].min()) if good.any() else float("inf")

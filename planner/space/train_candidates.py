"""The candidate space of training: every legal layout of a job on so many machines of a class, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.engines.training import Framework
from planner.models.spec import ModelSpec
from planner.request import OFFLOADS, TrainJob, TrainPins
from planner.space.hardware_classes import HardwareClass
from planner.space.train_layout import job_problem, legal
from planner.space.train_rows import TrainRows

POWERS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT_DEGREES = (1, 2, 4, 8)
CONTEXT_FROM_TOKENS = 8192
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
INTERVALS = (0, 1, 2, 4, 8)
MACHINES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def _pin(values: Sequence[int], wanted: int | None) -> list[int]:
    return list(values) if wanted is None else [wanted]


def pipeline_degrees(model: ModelSpec, world: int) -> list[int]:
    """Powers of two and divisors of the number of layers, up to 64 stages and the number of GPUs."""
    layers = len(model.layers)
    degrees = set(POWERS) | {d for d in range(1, min(layers, 64) + 1) if layers % d == 0}
    return sorted(d for d in degrees if d <= min(layers, world))


def _framework_axes(
    model: ModelSpec, job: TrainJob, hw: HardwareClass, world: int, framework: Framework, pins: TrainPins
) -> list[list[int]]:
    """Values of each searched axis of one framework, in the order tensor, pipeline, context, expert, stage, micro, interval, offload."""
    axes = framework.axes
    tensor = [t for t in POWERS if t <= hw.gpus_per_node] if "tensor" in axes else [1]
    pipeline = pipeline_degrees(model, world) if "pipeline" in axes else [1]
    context = list(CONTEXT_DEGREES) if "context" in axes and job.seq_len >= CONTEXT_FROM_TOKENS else [1]
    expert = [e for e in POWERS if e <= world] if "expert" in axes and model.is_moe else [1]
    intervals = [k for k in INTERVALS if k <= 1 or framework.checkpoint_any_interval]
    offloads = [0, *(OFFLOADS.index(kind) for kind in framework.offloads)]
    if pins.offload is not None:
        offloads = [OFFLOADS.index(pins.offload)]
    return [
        _pin(tensor, pins.tensor_parallel),
        _pin(pipeline, pins.pipeline_parallel),
        _pin(context, pins.context_parallel),
        _pin(expert, pins.expert_parallel),
        _pin(framework.zero_stages, pins.zero_stage),
        _pin(MICRO_BATCHES, pins.micro_batch_size),
        _pin(intervals, pins.checkpoint_interval),
        sorted(set(offloads)),
    ]


def batch_range(job: TrainJob) -> tuple[int, int]:
    """(fewest, most) sequences of the global batch.

    Unstated: 2**20 tokens for full training, an eighth of that for adapters, never more than the run has; a quarter of
    that at the least.
    """
    if job.batch_tokens_high is not None:
        most = max(1, round(job.batch_tokens_high / job.seq_len))
        return max(1, round((job.batch_tokens_low or job.batch_tokens_high) / job.seq_len)), most
    tokens = 2**20 if job.method == "full" else 2**17
    most = max(1, min(tokens // job.seq_len, int(job.tokens // job.seq_len) or 1))
    return max(1, most // 4), most


def enumerate_rows(
    model: ModelSpec, job: TrainJob, hw: HardwareClass, machines: int, frameworks: Sequence[Framework], pins: TrainPins
) -> tuple[TrainRows, int]:
    """All legal rows that use every GPU of `machines` machines, and how many illegal ones were left out.

    Accumulation makes the global batch as large as the job allows, since fewer optimizer steps never take longer; a
    layout that cannot keep within the allowed batch is illegal.
    """
    world = machines * hw.gpus_per_node
    fewest, most = batch_range(job)
    parts: list[list[np.ndarray]] = []
    for number, framework in enumerate(frameworks):
        if job_problem(model, job, framework, hw.gpu) is not None or (pins.framework not in (None, framework.name)):
            continue
        grids = np.meshgrid(*_framework_axes(model, job, hw, world, framework.on(hw.gpu), pins), indexing="ij")
        tensor, pipeline, context, expert, stage, micro, interval, offload = (g.ravel().astype(np.int64) for g in grids)
        ranks = tensor * pipeline * context
        data = world // ranks
        accumulation = most // np.maximum(micro * data, 1)
        batch = micro * data * accumulation
        good = (ranks * data == world) & (accumulation >= 1) & (batch >= fewest)
        if pins.data_parallel is not None:
            good &= data == pins.data_parallel
        columns = (
            np.full(len(tensor), number),
            tensor,
            pipeline,
            context,
            data,
            expert,
            stage,
            micro,
            accumulation,
            interval,
            offload,
            np.zeros(len(tensor)),
        )
        parts.append([c[good] for c in columns])
    if not parts:
        return TrainRows.of([]), 0
    rows = TrainRows(*(np.concatenate(columns).astype(np.int64) for columns in zip(*parts, strict=True)))
    rows = _even_where_needed(model, frameworks, rows)
    allowed = legal(model, job, hw, frameworks, rows)
    return rows.take(allowed), int(len(rows) - allowed.sum())


def _even_where_needed(model: ModelSpec, frameworks: Sequence[Framework], rows: TrainRows) -> TrainRows:
    """Rows whose checkpoints must divide the layers of every stage get equal stages."""
    layers = len(model.layers)
    degrees = [d for d in range(2, layers + 1) if layers % d == 0]
    divides = np.array([f.combinations.checkpoint_divides for f in frameworks])[rows.framework]
    tied = divides & (rows.checkpoint_interval > 1) & np.isin(rows.pipeline_parallel, degrees)
    split = np.where(tied, np.searchsorted(degrees, rows.pipeline_parallel) + 1, 0)
    return replace(rows, split=split, splits=tuple((layers // d,) * d for d in degrees))


def machine_counts(limit: int | None, gpus_per_node: int, max_gpus: int) -> list[int]:
    """How many machines to try: a grid of counts, the limit itself, never above max_gpus GPUs."""
    top = max_gpus // gpus_per_node
    if limit is not None:
        top = min(top, limit)
    counts = {n for n in MACHINES if n <= top}
    return sorted(counts | ({top} if top >= 1 and limit is not None else set()))

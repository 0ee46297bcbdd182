"""Time of a training step, many rows at once.

    slot   = forward + backward (+ forward again with checkpoints) of the slowest stage, with its traffic;
             again = forward - last matrix of each checkpoint, where recomputation stops early
    step   = (m - 1) slot + sum of all stages (1F1B) + exposed data-parallel traffic + optimizer + offload

Data-parallel traffic is that of the fullest stage and hides behind the compute of a mean stage.

Volumes in model bytes: ZeRO-0 all-reduce; 1: reduce-scatter and all-gather once a step; 2: reduce-scatter every
micro-batch (DeepSpeed all-reduces in both); 3: two all-gathers and a reduce-scatter every micro-batch. Tensor parallel: two all-reduces of 2 b s h a
layer forward, two backward.
Measured error: see planner accuracy --training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.engines.training import Framework
from planner.estimator.memory.train_activations import layer_kept_bytes
from planner.estimator.memory.train_ranks import rank_stages
from planner.estimator.time.kernels import peak_flops
from planner.estimator.time.train_layers import Passes, Work, gemm, last_gemm_s, layer_passes
from planner.estimator.time.train_passes import optimizer_s
from planner.estimator.time.train_traffic import Sync, between_stages_s, layer_traffic, offload_s, sync_s
from planner.estimator.train_stages import Cut, Stages, floor_stages, layer_flops_per_token, stages_of
from planner.models.spec import ModelSpec
from planner.request import TrainJob
from planner.space.hardware_classes import HardwareClass
from planner.space.train_rows import IntArray, TrainRows, compact

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TrainTime:
    """Seconds of one step and its parts, float arrays of equal length; tokens/s of all GPUs and of one; mfu 0..1.

    mfu counts model FLOPs (6 N + attention, recomputation not counted) against the dense peak of the compute dtype.
    """

    step_time_s: FloatArray
    compute_s: FloatArray
    recompute_s: FloatArray
    tensor_comm_s: FloatArray
    pipeline_bubble_s: FloatArray
    data_comm_exposed_s: FloatArray
    optimizer_s: FloatArray
    offload_s: FloatArray
    tokens_per_s: FloatArray
    tokens_per_s_per_gpu: FloatArray
    mfu: FloatArray


def model_flops_per_token(model: ModelSpec, job: TrainJob) -> float:
    """6 N + 6 L h s for a dense model: thrice the forward FLOPs of active parameters, head and causal attention."""
    body = sum(layer_flops_per_token(layer, model.hidden, job.seq_len) * n for layer, n in model.layer_groups)
    return 3.0 * (body + 2.0 * model.vocab * model.hidden)


@dataclass(frozen=True)
class _Slots:
    """Seconds per micro-batch for U combinations: each of S stages by pass, (6, U, S): forward, backward, traffic of each, last matrix
    and last all-reduce of every layer (what early stop saves); all stages together (everything ...), (U,); compute of a mean stage."""

    parts: FloatArray
    everything: FloatArray
    everything_again: FloatArray
    everything_tail: FloatArray
    mean_forward: FloatArray
    mean_backward: FloatArray
    mean_tail: FloatArray


def _head(model: ModelSpec, work: Work) -> Passes:
    """Output head and loss."""
    n = work.framework.number
    ways = work.tensor if n("logits_split") else np.ones_like(work.tensor)
    plain = replace(
        work, job=replace(work.job, precision="bf16" if work.job.precision in ("fp8", "fp4") else work.job.precision)
    )
    products = gemm(plain, model.vocab / ways, np.full_like(ways, float(model.hidden)))
    stream = n("head_passes") * 4.0 * model.vocab * work.tokens / ways / work.bandwidth
    weights = products.weights if work.job.method == "full" else np.zeros_like(stream)
    return Passes(products.forward + stream / 3, products.inputs + weights + stream * 2 / 3, np.zeros_like(stream))


@dataclass(frozen=True)
class _Costs:
    """Seconds of one layer of each group (U, G) by pass, of its last matrix and all-reduce where recomputation stops before them,
    and of the head (U,)."""

    forward: FloatArray
    backward: FloatArray
    out: FloatArray
    back: FloatArray
    tail: FloatArray
    reduced: FloatArray
    head: Passes


def _costs(model: ModelSpec, hw: HardwareClass, work: Work) -> _Costs:
    groups = [layer for layer, _ in model.layer_groups]
    passes = []
    for layer in groups:
        kept = layer_kept_bytes(
            layer,
            model.hidden,
            replace(work.job, method="full"),
            work.framework,
            tokens=work.tokens,
            tensor=work.tensor,
        )
        passes.append(layer_passes(work, layer, model.hidden, kept))
    forward = np.stack([p.forward for p in passes], axis=1)
    backward = np.stack([p.inputs for p in passes], axis=1)
    out, back, reduce = layer_traffic(model, hw, work)
    early = work.framework.number("early_stop")
    tail = early * np.stack([last_gemm_s(work, layer, model.hidden) for layer in groups], axis=1)
    tail = np.minimum(tail, forward)
    return _Costs(forward, backward, out, back, tail, early * reduce * (tail > 0), _head(model, work))


def _slots(costs: _Costs, pipeline: IntArray, cut: Stages) -> _Slots:
    head, layer = costs.head, (costs.forward, costs.backward, costs.out, costs.back, costs.tail, costs.reduced)
    ends = (head.forward, head.inputs, 0.0, 0.0, 0.0, 0.0)
    parts = np.stack(
        [
            (cut.counts * x[:, None, :]).sum(2) + np.asarray(h)[..., None] * cut.heads
            for x, h in zip(layer, ends, strict=True)
        ]
    )
    every = (cut.total * sum(layer[:4])).sum(1) + head.forward + head.inputs
    repeat = (cut.total * (costs.forward + costs.out)).sum(1) + head.forward
    saved = (cut.total * (costs.tail + costs.reduced)).sum(1)
    forward = ((cut.total * costs.forward).sum(1) + head.forward) / pipeline
    backward = ((cut.total * costs.backward).sum(1) + head.inputs) / pipeline
    return _Slots(parts, every, repeat, saved, forward, backward, (cut.total * costs.tail).sum(1) / pipeline)


def _slowest(slots: _Slots, at: IntArray, again: FloatArray, skips: FloatArray) -> FloatArray:
    """The parts (6, N) of each row's slowest stage, recomputation (again, less what early stop skips) counted."""
    once, repeat, saved = slots.parts[:4].sum(0), slots.parts[0] + slots.parts[2], slots.parts[4] + slots.parts[5]
    stage = np.argmax(once[at] + again[:, None] * repeat[at] - skips[:, None] * saved[at], axis=1)
    return np.asarray(slots.parts[:, at, stage])


def _one_framework(
    model: ModelSpec,
    job: TrainJob,
    hw: HardwareClass,
    framework: Framework,
    rows: TrainRows,
    *,
    interleave: FloatArray,
    cut: Cut,
) -> dict[str, FloatArray]:
    framework = framework.on(hw.gpu)
    work, pipeline, split, at = _work(job, hw, framework, rows)
    if cut == "floor":
        shape = floor_stages(model, pipeline, ends=True)
    else:
        shape = stages_of(model, job.seq_len, pipeline, framework.uneven_stages, split, rows.splits)
    slots = _slots(_costs(model, hw, work), pipeline, shape)
    hops, tied = between_stages_s(model, hw, work, pipeline)
    replica = rows.tensor_parallel * rows.context_parallel * rows.data_parallel
    outside = (2 * replica > hw.gpus_per_node).astype(np.int64)
    again = (rows.checkpoint_interval > 0).astype(float)
    m, p, hop = rows.gradient_accumulation_steps, rows.pipeline_parallel, 2 * hops[outside, at] * interleave
    skips = again * (rows.zero_stage < framework.number("early_stop_below")) / np.maximum(1, rows.checkpoint_interval)
    forward, back, out, inward, tail, reduced = _slowest(slots, at, again, skips)
    compute, recompute = forward + back, forward * again - tail * skips
    traffic = hop + out + inward + out * again - reduced * skips
    whole = (
        slots.everything[at] + slots.everything_again[at] * again - slots.everything_tail[at] * skips + hop * (p - 1)
    )
    bubble = np.where(p > 1, (whole - compute - recompute - traffic) / interleave, 0.0)

    degrees = (work.tensor, work.context, work.expert, work.sequences)
    tensor, context, expert, micro = (x.astype(np.int64) for x in degrees)
    stages = rank_stages(model, job, framework, (tensor, context, expert, micro), shape)
    lives = (rows.zero_stage == 3) & (framework.number("max_live_elements") > 0)
    keys, at2 = compact(
        at, rows.tensor_parallel, rows.context_parallel, rows.data_parallel, rows.expert_parallel, rows.zero_stage,
        rows.checkpoint_interval * lives,
    )  # fmt: skip
    sync = sync_s(model, job, hw, framework, stages, keys)
    mean_again = slots.mean_forward[at] * again - slots.mean_tail[at] * skips
    backward = slots.mean_backward[at] + mean_again
    exposed = _exposed_s(sync, at2, framework, m, (slots.mean_forward[at] + backward, backward))
    exposed = exposed + tied[outside, at]
    optimizer = optimizer_s(job, hw.gpu, framework, rows, sync.owned[at2])
    offload = offload_s(hw, framework, rows, sync.owned[at2], sync.frozen[at2])
    slot = compute + recompute + traffic
    return {
        "compute": compute * m, "recompute": recompute * m, "tensor": traffic * m, "bubble": bubble, "data": exposed,
        "optimizer": optimizer, "offload": offload, "step": slot * m + bubble + exposed + optimizer + offload,
    }  # fmt: skip


def _work(
    job: TrainJob, hw: HardwareClass, framework: Framework, rows: TrainRows
) -> tuple[Work, IntArray, IntArray, IntArray]:
    """Combinations that times depend on, their pipeline degrees and splits, and the combination of each row."""
    combos, at = compact(
        rows.tensor_parallel, rows.pipeline_parallel, rows.context_parallel, rows.expert_parallel, rows.micro_batch_size,
        rows.split,
    )  # fmt: skip
    t, c, e, b = (combos[i].astype(float) for i in (0, 2, 3, 4))
    return Work(hw.gpu, job, framework, b * job.seq_len / c, b, t, c, e), combos[1], combos[5], at


def _exposed_s(
    sync: Sync, at: IntArray, framework: Framework, m: IntArray, hides: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """Data-parallel traffic that compute does not hide, and the slowdown of compute by what it hides.

    hides: compute of a micro-batch, backward of one (the last, behind which once-a-step traffic hides), of a mean stage.
    """
    n, each, once = framework.number, sync.each_s[at], sync.once_s[at]
    left = np.maximum(each - n("data_overlap") * hides[0], sync.first_s[at]) * m
    left = left + np.maximum(once - n("data_overlap") * hides[1], 0.0)
    return np.asarray(left + sync.bare_s[at] + n("hidden_tax") * np.maximum(each * m + once - left, 0.0))


def layer_and_head_s(
    model: ModelSpec, job: TrainJob, hw: HardwareClass, framework: Framework, rows: TrainRows
) -> tuple[FloatArray, FloatArray]:
    """Seconds of one micro-batch in the mean layer (with its traffic and recomputation) and in the head, per row.

    A stage of n layers takes n * layer (+ head in the last): what cutting layers into stages balances.
    """
    framework = framework.on(hw.gpu)
    work, _, _, at = _work(job, hw, framework, rows)
    costs, again = _costs(model, hw, work), (rows.checkpoint_interval > 0).astype(float)
    share = np.array([n for _, n in model.layer_groups]) / len(model.layers)
    once = ((costs.forward + costs.backward + costs.out + costs.back) * share).sum(1)
    repeat = ((costs.forward + costs.out) * share).sum(1)
    stops = rows.zero_stage < framework.number("early_stop_below")
    saved = ((costs.tail + costs.reduced) * share).sum(1)[at] * stops / np.maximum(1, rows.checkpoint_interval)
    head = (costs.head.forward + costs.head.inputs)[at] + costs.head.forward[at] * again
    return once[at] + (repeat[at] - saved) * again, head


def training_time(
    model: ModelSpec,
    job: TrainJob,
    hw: HardwareClass,
    frameworks: Sequence[Framework],
    rows: TrainRows,
    *,
    interleave: FloatArray | None = None,
    cut: Cut = "split",
) -> TrainTime:
    """Time of each row; equation in the module's docstring. interleave: model chunks per stage (None = 1).

    cut: "floor" = no split of the layers over the stages is faster.
    """
    size = len(rows)
    chunks = np.ones(size) if interleave is None else np.asarray(interleave, dtype=float)
    names = ("step", "compute", "recompute", "tensor", "bubble", "data", "optimizer", "offload")
    columns = {k: np.zeros(size) for k in names}
    for number, framework in enumerate(frameworks):
        mask = rows.framework == number
        if mask.all() and size:
            columns.update(_one_framework(model, job, hw, framework, rows, interleave=chunks, cut=cut))
        elif mask.any():
            for key, value in _one_framework(
                model, job, hw, framework, rows.take(mask), interleave=chunks[mask], cut=cut
            ).items():
                columns[key][mask] = value
    tokens = rows.micro_batch_size * rows.gradient_accumulation_steps * rows.data_parallel * float(job.seq_len)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = tokens / columns["step"]
    gpu_rate = rate / rows.world
    flops = model_flops_per_token(model, job)
    return TrainTime(
        step_time_s=columns["step"],
        compute_s=columns["compute"],
        recompute_s=columns["recompute"],
        tensor_comm_s=columns["tensor"],
        pipeline_bubble_s=columns["bubble"],
        data_comm_exposed_s=columns["data"],
        optimizer_s=columns["optimizer"],
        offload_s=columns["offload"],
        tokens_per_s=rate,
        tokens_per_s_per_gpu=gpu_rate,
        mfu=gpu_rate * flops / peak_flops(hw.gpu, job.precision),
    )

"""Time of a training step, many rows at once.

    slot   = forward + backward (+ forward again with checkpoints) of the slowest stage, with its traffic;
             again = forward - last matrix of each checkpoint, where recomputation stops early
    step   = (m - 1) slot + sum of all stages (1F1B) + exposed data-parallel traffic + optimizer + offload

Volumes in model bytes: ZeRO-0 all-reduce; 1: reduce-scatter and all-gather once a step; 2: reduce-scatter every
micro-batch; 3: two all-gathers and a reduce-scatter every micro-batch. Tensor parallel: two all-reduces of 2 b s h a
layer forward, two backward.
Measured error: see planner accuracy --training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.engines.training import Framework, host_link_gb_per_s
from planner.estimator.memory.train_activations import layer_kept_bytes
from planner.estimator.memory.train_states import state_bytes
from planner.estimator.memory.training import rank_stages
from planner.estimator.time.kernels import peak_flops
from planner.estimator.time.train_layers import Passes, Work, gemm, last_gemm_s, layer_passes
from planner.estimator.time.train_traffic import Sync, between_stages_s, layer_traffic, offload_s, sync_s
from planner.estimator.train_stages import Stages, layer_flops_per_token, stages_of
from planner.models.spec import ModelSpec
from planner.request import TrainJob
from planner.space.hardware_classes import HardwareClass
from planner.space.train_rows import IntArray, TrainRows, compact
from planner.units import GB

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
    """Seconds per micro-batch for U combinations: at the slowest stage (with traffic of each pass) and over all.

    tail, traffic_tail, everything_tail: last matrix and last all-reduce of every layer.
    """

    forward: FloatArray
    backward: FloatArray
    traffic_forward: FloatArray
    traffic_backward: FloatArray
    everything: FloatArray
    everything_again: FloatArray
    tail: FloatArray
    traffic_tail: FloatArray
    everything_tail: FloatArray


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


def _slots(model: ModelSpec, hw: HardwareClass, work: Work, cut: Stages) -> _Slots:
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
    tail, reduced = np.minimum(tail, forward), early * reduce * (tail > 0)
    head = _head(model, work)
    stages = []
    for s in range(3):
        counts, last = cut.counts[:, s], cut.heads[:, s]
        stages.append(
            (
                (counts * forward).sum(1) + head.forward * last,
                (counts * backward).sum(1) + head.inputs * last,
                (counts * out).sum(1),
                (counts * back).sum(1),
                (counts * tail).sum(1),
                (counts * reduced).sum(1),
            )
        )
    worst = np.argmax(np.stack([sum(parts[:4]) for parts in stages]), axis=0)
    chosen = [np.choose(worst, [parts[i] for parts in stages]) for i in range(6)]
    once = (cut.total * (forward + backward + out + back)).sum(1) + head.forward + head.inputs
    again = (cut.total * (forward + out)).sum(1) + head.forward
    return _Slots(
        chosen[0],
        chosen[1],
        chosen[2],
        chosen[3],
        once,
        again,
        chosen[4],
        chosen[5],
        (cut.total * (tail + reduced)).sum(1),
    )


def _one_framework(
    model: ModelSpec, job: TrainJob, hw: HardwareClass, framework: Framework, rows: TrainRows, *, interleave: FloatArray
) -> dict[str, FloatArray]:
    combos, at = compact(
        rows.tensor_parallel, rows.pipeline_parallel, rows.context_parallel, rows.expert_parallel, rows.micro_batch_size
    )
    tensor, pipeline, context, expert, micro = combos
    t, c, e, b = (x.astype(float) for x in (tensor, context, expert, micro))
    work = Work(hw.gpu, job, framework, b * job.seq_len / c, b, t, c, e)
    cut = stages_of(model, job.seq_len, pipeline, np.full(len(tensor), framework.uneven_stages))
    slots = _slots(model, hw, work, cut)
    hops, tied = between_stages_s(model, hw, work, pipeline)
    replica = rows.tensor_parallel * rows.context_parallel * rows.data_parallel
    outside = (2 * replica > hw.gpus_per_node).astype(np.int64)
    again = (rows.checkpoint_interval > 0).astype(float)
    m, p, hop = rows.gradient_accumulation_steps, rows.pipeline_parallel, 2 * hops[outside, at]
    skips = again / np.maximum(1, rows.checkpoint_interval)
    compute, recompute = (slots.forward + slots.backward)[at], slots.forward[at] * again - slots.tail[at] * skips
    traffic = hop + (slots.traffic_forward + slots.traffic_backward)[at]
    traffic = traffic + slots.traffic_forward[at] * again - slots.traffic_tail[at] * skips
    whole = (
        slots.everything[at] + slots.everything_again[at] * again - slots.everything_tail[at] * skips + hop * (p - 1)
    )
    bubble = np.where(p > 1, (whole - compute - recompute - traffic) / interleave, 0.0)

    stages = rank_stages(model, job, framework, (tensor, pipeline, context, expert, micro))
    keys, at2 = compact(
        at, rows.tensor_parallel, rows.context_parallel, rows.data_parallel, rows.expert_parallel, rows.zero_stage
    )
    sync = sync_s(job, hw, framework, stages, keys)
    exposed = _exposed_s(sync, at2, framework, m, (compute + recompute, slots.backward[at] + recompute))
    exposed = exposed + tied[outside, at]
    optimizer = _optimizer_s(job, hw, framework, rows, sync.owned[at2])
    offload = offload_s(job, hw, framework, rows, sync.owned[at2])
    slot = compute + recompute + traffic
    return {
        "compute": compute * m, "recompute": recompute * m, "tensor": traffic * m, "bubble": bubble, "data": exposed,
        "optimizer": optimizer, "offload": offload, "step": slot * m + bubble + exposed + optimizer + offload,
    }  # fmt: skip


def _exposed_s(
    sync: Sync, at: IntArray, framework: Framework, m: IntArray, hides: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """Data-parallel traffic that compute does not hide, and the slowdown of compute by what it hides.

    hides: compute of a micro-batch, backward of one (the last, behind which once-a-step traffic hides).
    """
    n, each, once = framework.number, sync.each_s[at], sync.once_s[at]
    left = np.maximum(each - n("data_overlap") * hides[0], sync.first_s[at]) * m
    left = left + np.maximum(once - n("data_overlap") * hides[1], 0.0)
    return np.asarray(left + n("hidden_tax") * np.maximum(each * m + once - left, 0.0))


def _optimizer_s(
    job: TrainJob, hw: HardwareClass, framework: Framework, rows: TrainRows, owned: FloatArray
) -> FloatArray:
    """The step on the GPU streams every state in and out once; paged moments cross the host link."""
    n, per = framework.number, state_bytes(job, framework)
    moved = 2 * per.optimizer + per.gradients + per.weights
    stream = moved * owned / (hw.gpu.bandwidth_gb_per_s * GB * n("optimizer_efficiency"))
    paged = 2 * per.host * owned / (host_link_gb_per_s(hw.gpu.pcie_gen) * GB)
    return np.asarray(np.where(rows.offload > 0, 0.0, stream + paged) + n("step_overhead_s"))


def training_time(
    model: ModelSpec,
    job: TrainJob,
    hw: HardwareClass,
    frameworks: Sequence[Framework],
    rows: TrainRows,
    *,
    interleave: FloatArray | None = None,
) -> TrainTime:
    """Time of each row; equation in the module's docstring. interleave: model chunks per stage (None = 1)."""
    size = len(rows)
    chunks = np.ones(size) if interleave is None else np.asarray(interleave, dtype=float)
    names = ("step", "compute", "recompute", "tensor", "bubble", "data", "optimizer", "offload")
    columns = {k: np.zeros(size) for k in names}
    for number, framework in enumerate(frameworks):
        mask = rows.framework == number
        if mask.all() and size:
            columns.update(_one_framework(model, job, hw, framework, rows, interleave=chunks))
        elif mask.any():
            for key, value in _one_framework(
                model, job, hw, framework, rows.take(mask), interleave=chunks[mask]
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

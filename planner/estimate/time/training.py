"""Time of a training step, many rows at once.

    slot   = forward + backward (+ forward again with checkpoints) of the slowest stage, tensor and context traffic included
    step   = (m - 1) slot + sum of all stages (1F1B) + exposed data-parallel traffic + optimizer + offload

Volumes in model bytes: ZeRO-0 all-reduce; 1: reduce-scatter and all-gather once a step; 2: reduce-scatter every micro-batch;
3: two all-gathers and a reduce-scatter every micro-batch. Tensor parallel: two all-reduces of 2 b s h a layer forward, two backward.
Measured error: see planner accuracy --training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.engines.training import Framework, host_link_gb_per_s
from planner.estimate.memory.train_activations import layer_kept_bytes
from planner.estimate.memory.train_states import adapter_params, state_bytes
from planner.estimate.memory.training import RankStage, rank_stages
from planner.estimate.time.collectives import Fabric, all_gather_s, all_reduce_s, all_to_all_s, fabric, p2p_s
from planner.estimate.time.kernels import peak_flops
from planner.estimate.time.train_layers import Passes, Work, gemm, layer_passes
from planner.estimate.train_stages import Stages, layer_flops_per_token, stages_of
from planner.hardware.records import Link
from planner.models.spec import Attention, LatentAttention, ModelSpec, MoeMlp
from planner.request import OFFLOADS, TrainJob
from planner.space.hardware_classes import HardwareClass
from planner.space.train_rows import IntArray, TrainRows, compact
from planner.units import GB

FloatArray = npt.NDArray[np.float64]
ELEMENT_BYTES = 2.0


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
    """6 N + 6 L h s for a dense model: three times the forward FLOPs of active parameters, head and causal attention."""
    body = sum(layer_flops_per_token(layer, model.hidden, job.seq_len) * n for layer, n in model.layer_groups)
    return 3.0 * (body + 2.0 * model.vocab * model.hidden)


@dataclass(frozen=True)
class _Slots:
    """Seconds per micro-batch for U combinations: at the slowest stage (forward, backward, traffic of each) and over all."""

    forward: FloatArray
    backward: FloatArray
    traffic_forward: FloatArray
    traffic_backward: FloatArray
    all_forward: FloatArray
    all_backward: FloatArray
    all_traffic_forward: FloatArray
    all_traffic_backward: FloatArray


def spread_link(hw: HardwareClass, inside: int, ranks: int) -> Link | None:
    """Link of a group of `ranks` that stand `inside` GPUs apart: inside a machine its own, else the network.

    A group with several members in each machine drives as many network cards at once: bandwidth = members * card, at most the machine's link.
    """
    local = max(1, hw.gpus_per_node // max(1, inside))
    if ranks <= local or hw.fabric is None:
        return hw.link
    members = min(local, ranks)
    if members == 1:
        return hw.fabric
    card = hw.fabric.measured_busbw_gb_per_s
    cap = hw.link.measured_busbw_gb_per_s or hw.link.bandwidth_gb_per_s
    return replace(
        hw.fabric,
        name=f"{hw.fabric.name}*{members}",
        bandwidth_gb_per_s=min(
            hw.fabric.bandwidth_gb_per_s * members, hw.link.bandwidth_gb_per_s or hw.fabric.bandwidth_gb_per_s
        ),
        measured_busbw_gb_per_s=min(card * members, cap) if card else None,
    )


def _groups(hw: HardwareClass, inside: IntArray, ranks: IntArray) -> Fabric:
    return fabric([spread_link(hw, i, r) for i, r in zip(inside.tolist(), ranks.tolist(), strict=True)], ranks.tolist())


def _flat(values: FloatArray) -> FloatArray:
    return np.asarray(values)[:, 0]


def _layer_traffic(model: ModelSpec, hw: HardwareClass, work: Work) -> tuple[FloatArray, FloatArray]:
    """Exposed seconds of tensor, context and expert traffic of each layer group, forward and backward, (U, G) each."""
    n = work.framework.number
    one = np.ones(len(work.tokens), dtype=np.int64)
    tensor, context, expert = (np.asarray(x, dtype=np.int64) for x in (work.tensor, work.context, work.expert))
    reduce = _flat(all_reduce_s(_groups(hw, one, tensor), (ELEMENT_BYTES * model.hidden * work.tokens)[:, None]))
    inner = 2 * reduce * n("tensor_exposed")
    ring, spread = _groups(hw, tensor, context), _groups(hw, one, expert)
    forward, backward = [], []
    for layer, _ in model.layer_groups:
        keys = 0.0
        for mixer in layer.mixers:
            if isinstance(mixer, Attention):
                keys += mixer.kv_heads * (mixer.head_dim + mixer.value_dim)
            elif isinstance(mixer, LatentAttention):
                keys += mixer.cache_dim
        moved = ELEMENT_BYTES * work.tokens * work.context * keys / work.tensor
        exchange = _flat(all_gather_s(ring, moved[:, None])) * n("context_exposed")
        dispatch = np.zeros_like(inner)
        if isinstance(layer.mlp, MoeMlp):
            sent = ELEMENT_BYTES * work.tokens * layer.mlp.experts_per_token * model.hidden / work.tensor
            dispatch = 2 * _flat(all_to_all_s(spread, sent[:, None])) * n("expert_exposed")
        forward.append(inner + exchange + dispatch)
        backward.append(inner + 2 * exchange + dispatch)
    return np.stack(forward, axis=1), np.stack(backward, axis=1)


def _head(model: ModelSpec, work: Work) -> Passes:
    """Output head and loss."""
    n = work.framework.number
    ways = work.tensor if n("logits_split") else np.ones_like(work.tensor)
    products = gemm(work, model.vocab / ways, np.full_like(ways, float(model.hidden)))
    stream = n("head_passes") * 4.0 * model.vocab * work.tokens / ways / work.bandwidth
    weights = products.weights if work.job.method == "full" else np.zeros_like(stream)
    return Passes(products.forward + stream / 3, products.inputs + weights + stream * 2 / 3, np.zeros_like(stream))


def _slots(model: ModelSpec, hw: HardwareClass, work: Work, cut: Stages, pipeline: IntArray) -> _Slots:
    groups = [layer for layer, _ in model.layer_groups]
    passes = []
    for layer in groups:
        kept = layer_kept_bytes(
            layer, model.hidden, replace(work.job, method="full"), work.framework, work.tokens, work.tensor
        )
        passes.append(layer_passes(work, layer, model.hidden, kept))
    forward = np.stack([p.forward for p in passes], axis=1)
    backward = np.stack([p.inputs for p in passes], axis=1)
    out, back = _layer_traffic(model, hw, work)
    head = _head(model, work)
    hop = _flat(
        p2p_s(
            _groups(hw, np.asarray(work.tensor * work.context, dtype=np.int64), np.where(pipeline > 1, 2, 1)),
            _hop_bytes(model, work)[:, None],
        )
    )
    hop = hop * work.framework.number("pipeline_exposed")
    stages = []
    for s in range(3):
        counts, last = cut.counts[:, s], cut.heads[:, s]
        stages.append(
            (
                (counts * forward).sum(1) + head.forward * last,
                (counts * backward).sum(1) + head.inputs * last,
                (counts * out).sum(1),
                (counts * back).sum(1),
            )
        )
    worst = np.argmax(np.stack([sum(parts) for parts in stages]), axis=0)
    chosen = [np.choose(worst, [parts[i] for parts in stages]) for i in range(4)]
    total = cut.mean * pipeline[:, None]
    return _Slots(
        chosen[0], chosen[1], chosen[2] + hop, chosen[3] + hop, (total * forward).sum(1) + head.forward, (total * backward).sum(1) + head.inputs,
        (total * out).sum(1) + hop * (pipeline - 1), (total * back).sum(1) + hop * (pipeline - 1),
    )  # fmt: skip


def _hop_bytes(model: ModelSpec, work: Work) -> FloatArray:
    ways = work.tensor if work.framework.sequence_parallel else np.ones_like(work.tensor)
    return np.asarray(ELEMENT_BYTES * model.hidden * work.tokens / ways)


@dataclass(frozen=True)
class _Sync:
    """Data-parallel traffic of U2 combinations: seconds per micro-batch and once a step; parameters for the optimizer."""

    each_s: FloatArray
    once_s: FloatArray
    first_s: FloatArray
    owned: FloatArray


def _sync(
    job: TrainJob, hw: HardwareClass, framework: Framework, stages: tuple[RankStage, ...], keys: tuple[IntArray, ...]
) -> _Sync:
    """keys: index of the combination, tensor, context, data, expert parallel, ZeRO stage."""
    at, tensor, context, data, expert, zero = keys
    n = framework.number
    dense, experts, frozen, layers = (
        np.max([getattr(s, name)[at] for s in stages], axis=0) for name in ("dense", "experts", "frozen", "layers")
    )
    ranks = data * context
    group = _groups(hw, tensor, ranks)
    spread = np.where(expert > 1, np.maximum(1, ranks * tensor // expert), ranks)
    expert_group = _groups(hw, np.where(expert > 1, expert, tensor), spread)
    calls = np.maximum(1.0, layers)

    def gather(per: float, base: FloatArray | float = 0.0) -> FloatArray:
        whole = _flat(all_gather_s(group, ((per * dense + base) / calls)[:, None]))
        return np.asarray(
            calls * (whole + _flat(all_gather_s(expert_group, (per * experts / calls)[:, None])) * (experts > 0))
        )

    grads, weights = gather(n("reduce_bytes")), gather(ELEMENT_BYTES)
    live = gather(ELEMENT_BYTES, frozen if job.method == "lora" or n("quantised_sharded") else 0.0)
    shards2 = n("stage2_gathered") > 0
    each = np.where(zero == 3, 2 * live + grads, np.where(zero == 2, grads + (live if shards2 else 0.0), 0.0))
    once = np.where(
        zero == 0, 2 * grads, np.where(zero == 1, grads + weights, np.where((zero == 2) & (not shards2), weights, 0.0))
    )
    split = np.where(zero >= 1, ranks, 1)
    owned = dense / split + experts / np.where(zero >= 1, spread, 1)
    return _Sync(each, once, np.where(zero == 3, live / calls, 0.0), owned)


def _offload_s(
    job: TrainJob, hw: HardwareClass, framework: Framework, rows: TrainRows, owned: FloatArray
) -> FloatArray:
    """Gradients down and weights up over the host link, the CPU optimizer, and weights up for every pass when they live there."""
    n = framework.number
    rate = host_link_gb_per_s(hw.gpu.pcie_gen) * GB
    kind = rows.offload
    per_machine = np.minimum(rows.world, hw.gpus_per_node)
    step = 2 * ELEMENT_BYTES * owned / rate + owned * per_machine / n("cpu_adam_params_per_s")
    weights = np.where(
        kind == OFFLOADS.index("optimizer+parameters"),
        2 * ELEMENT_BYTES * owned / rate * rows.gradient_accumulation_steps,
        0.0,
    )
    paged = 2 * state_bytes(job, framework).host * owned / rate * 0.0
    return np.asarray(np.where(kind > 0, step + weights, paged))


def _one_framework(
    model: ModelSpec, job: TrainJob, hw: HardwareClass, framework: Framework, rows: TrainRows, interleave: FloatArray
) -> dict[str, FloatArray]:
    n = framework.number
    combos, at = compact(
        rows.tensor_parallel, rows.pipeline_parallel, rows.context_parallel, rows.expert_parallel, rows.micro_batch_size
    )
    tensor, pipeline, context, expert, micro = combos
    work = Work(
        hw.gpu,
        job,
        framework,
        micro * float(job.seq_len) / context,
        micro.astype(float),
        tensor.astype(float),
        context.astype(float),
        expert.astype(float),
    )
    cut = stages_of(model, job.seq_len, pipeline, np.full(len(tensor), framework.uneven_stages))
    slots = _slots(model, hw, work, cut, pipeline)
    stages = rank_stages(model, job, framework, (tensor, pipeline, context, expert, micro))
    keys, at2 = compact(
        at, rows.tensor_parallel, rows.context_parallel, rows.data_parallel, rows.expert_parallel, rows.zero_stage
    )
    sync = _sync(job, hw, framework, stages, keys)

    again = (rows.checkpoint_interval > 0).astype(float)
    m, p = rows.gradient_accumulation_steps, rows.pipeline_parallel
    compute, recompute = (slots.forward + slots.backward)[at], slots.forward[at] * again
    traffic = (slots.traffic_forward + slots.traffic_backward)[at] + slots.traffic_forward[at] * again
    slot = compute + recompute + traffic
    whole = (slots.all_forward + slots.all_backward)[at] + slots.all_forward[at] * again
    whole = whole + (slots.all_traffic_forward + slots.all_traffic_backward)[at] + slots.all_traffic_forward[at] * again
    bubble = np.where(p > 1, (whole - slot) / interleave, 0.0)
    backward = slots.backward[at] + recompute
    each, once = sync.each_s[at2], sync.once_s[at2]
    hide = n("data_overlap")
    exposed = np.maximum(each - hide * (compute + recompute), sync.first_s[at2]) * m + np.maximum(
        once - hide * backward, 0.0
    )
    exposed = exposed + n("hidden_tax") * np.maximum(each * m + once - exposed, 0.0)
    owned = sync.owned[at2]
    per = state_bytes(job, framework)
    moved = 2 * (per.optimizer + per.host) + per.gradients + per.weights
    optimizer = np.where(
        rows.offload > 0, 0.0, moved * owned / (hw.gpu.bandwidth_gb_per_s * GB * n("optimizer_efficiency"))
    ) + n("step_overhead_s")
    offload = _offload_s(job, hw, framework, rows, owned)
    return {
        "compute": compute * m, "recompute": recompute * m, "tensor": traffic * m, "bubble": bubble, "data": exposed,
        "optimizer": optimizer, "offload": offload, "step": slot * m + bubble + exposed + optimizer + offload,
    }  # fmt: skip


def training_time(
    model: ModelSpec,
    job: TrainJob,
    hw: HardwareClass,
    frameworks: Sequence[Framework],
    rows: TrainRows,
    interleave: FloatArray | None = None,
) -> TrainTime:
    """Time of each row; equation in the module's docstring. interleave: model chunks per stage (None = 1), for replay."""
    size = len(rows)
    chunks = np.ones(size) if interleave is None else np.asarray(interleave, dtype=float)
    names = ("step", "compute", "recompute", "tensor", "bubble", "data", "optimizer", "offload")
    columns = {k: np.zeros(size) for k in names}
    for number, framework in enumerate(frameworks):
        mask = rows.framework == number
        if mask.all() and size:
            columns.update(_one_framework(model, job, hw, framework, rows, chunks))
        elif mask.any():
            for key, value in _one_framework(model, job, hw, framework, rows.take(mask), chunks[mask]).items():
                columns[key][mask] = value
    tokens = rows.micro_batch_size * rows.gradient_accumulation_steps * rows.data_parallel * float(job.seq_len)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = tokens / columns["step"]
    gpu_rate = rate / rows.world
    flops = model_flops_per_token(model, job)
    return TrainTime(*(columns[k] for k in names), rate, gpu_rate, gpu_rate * flops / peak_flops(hw.gpu, job.precision))

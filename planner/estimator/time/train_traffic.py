"""Traffic of a training step: inside a layer (tensor, context, expert), between stages, data parallel, host link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.engines.training import Framework, host_link_gb_per_s
from planner.estimator.memory.training import RankStage
from planner.estimator.time.collectives import (
    Fabric,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    fabric,
    p2p_s,
    reduce_scatter_s,
)
from planner.estimator.time.train_layers import Work
from planner.hardware.records import Link
from planner.models.spec import Attention, LatentAttention, ModelSpec, MoeMlp
from planner.request import OFFLOADS, TrainJob
from planner.space.hardware_classes import HardwareClass
from planner.space.train_rows import IntArray, TrainRows
from planner.units import GB

FloatArray = npt.NDArray[np.float64]
ELEMENT_BYTES = 2.0
Collective = Callable[[Fabric, FloatArray], FloatArray]


def spread_link(hw: HardwareClass, inside: int, ranks: int) -> Link | None:
    """Link of a group of `ranks` that stand `inside` GPUs apart: inside a machine its own, else the network.

    A group with several members in each machine drives as many network cards at once: members * card, at most the
    machine's own link.
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


def layer_traffic(model: ModelSpec, hw: HardwareClass, work: Work) -> tuple[FloatArray, FloatArray]:
    """Exposed seconds of tensor, context and expert traffic of each layer group, forward and backward, (U, G) each."""
    n = work.framework.number
    one = np.ones(len(work.tokens), dtype=np.int64)
    tensor, context, expert = (np.asarray(x, dtype=np.int64) for x in (work.tensor, work.context, work.expert))
    reduce = _flat(all_reduce_s(_groups(hw, one, tensor), (ELEMENT_BYTES * model.hidden * work.tokens)[:, None]))
    inner = 2 * reduce * n("tensor_exposed")
    ring = _groups(hw, tensor, context)
    # tokens go to every rank at once: beyond one machine each rank has its own network card only
    spread = fabric([hw.link if e <= hw.gpus_per_node else hw.fabric for e in expert.tolist()], expert.tolist())
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


def _hop_bytes(model: ModelSpec, work: Work) -> FloatArray:
    ways = work.tensor if work.framework.sequence_parallel else np.ones_like(work.tensor)
    return np.asarray(ELEMENT_BYTES * model.hidden * work.tokens / ways)


@dataclass(frozen=True)
class Sync:
    """Data-parallel traffic of U2 combinations: seconds per micro-batch, a step, of one layer; parameters owned."""

    each_s: FloatArray
    once_s: FloatArray
    first_s: FloatArray
    owned: FloatArray


def sync_s(
    job: TrainJob, hw: HardwareClass, framework: Framework, stages: tuple[RankStage, ...], keys: tuple[IntArray, ...]
) -> Sync:
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

    def gather(per: float, base: FloatArray | float = 0.0, move: Collective = all_gather_s) -> FloatArray:
        whole = _flat(move(group, ((per * dense + base) / calls)[:, None]))
        return np.asarray(calls * (whole + _flat(move(expert_group, (per * experts / calls)[:, None])) * (experts > 0)))

    grads, weights = gather(n("reduce_bytes"), move=reduce_scatter_s), gather(ELEMENT_BYTES)
    summed = 2 * gather(n("reduce_bytes")) * _flat(group.all_reduce)
    live = gather(ELEMENT_BYTES, frozen if job.method == "lora" or n("quantised_sharded") else 0.0)
    shards2 = n("stage2_gathered") > 0
    each = np.where(zero == 3, 2 * live + grads, np.where(zero == 2, grads + (live if shards2 else 0.0), 0.0))
    once = np.where(
        zero == 0, summed, np.where(zero == 1, grads + weights, np.where((zero == 2) & (not shards2), weights, 0.0))
    )
    split = np.where(zero >= 1, ranks, 1)
    owned = dense / split + experts / np.where(zero >= 1, spread, 1)
    return Sync(each, once, np.where(zero == 3, live / calls, 0.0), owned)


def between_stages_s(
    model: ModelSpec, hw: HardwareClass, work: Work, pipeline: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Seconds of one hop of activations to the next stage, and of summing a tied embedding's gradients.

    The sum over first and last comes once a step and hides behind nothing. Each (2, U): inside a machine, over
    the network.
    """
    n, pair = work.framework.number, np.where(pipeline > 1, 2, 1)
    message = n("reduce_bytes") * model.vocab * model.hidden / work.tensor * float(model.tie_embeddings)
    hops, sums = [], []
    for link in (hw.link, hw.fabric or hw.link):
        group = fabric([link] * len(pair), pair.tolist())
        hops.append(_flat(p2p_s(group, _hop_bytes(model, work)[:, None])) * n("pipeline_exposed"))
        sums.append(_flat(all_reduce_s(group, message[:, None])) * float(model.tie_embeddings))
    return np.stack(hops), np.stack(sums)


def offload_s(job: TrainJob, hw: HardwareClass, framework: Framework, rows: TrainRows, owned: FloatArray) -> FloatArray:
    """Gradients down and weights up over the host link, the CPU optimizer, and weights up for every pass.

    owned: parameters whose states the rank keeps. The CPU optimizer is shared by the ranks of a machine.
    """
    n = framework.number
    rate = host_link_gb_per_s(hw.gpu) * GB
    per_machine = np.minimum(rows.world, hw.gpus_per_node)
    step = 2 * ELEMENT_BYTES * owned / rate + owned * per_machine / n("cpu_adam_params_per_s")
    both = rows.offload == OFFLOADS.index("optimizer+parameters")
    weights = np.where(both, 2 * ELEMENT_BYTES * owned / rate * rows.gradient_accumulation_steps, 0.0)
    return np.asarray(np.where(rows.offload > 0, step + weights, 0.0))

"""Traffic of a training step: inside a layer (tensor, context, expert), between stages, data parallel, host link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.engines.training import Framework, host_link_gb_per_s
from planner.estimator.memory.train_ranks import RankStage, rank_stages
from planner.estimator.memory.train_states import frozen_kept, train_state_bytes
from planner.estimator.time.collectives import (
    Fabric,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    fabric,
    p2p_s,
    reduce_scatter_s,
)
from planner.estimator.time.train_gathers import gather_passes
from planner.estimator.time.train_layers import Work
from planner.estimator.time.train_passes import fresh_s, reduce_passes_s
from planner.estimator.train_stages import stages_of
from planner.hardware.records import Link
from planner.models.spec import Attention, DenseMlp, LatentAttention, ModelSpec, MoeMlp
from planner.request import OFFLOADS, TrainJob
from planner.space.hardware_classes import HardwareClass
from planner.space.train_rows import IntArray, TrainRows, compact
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


def layer_traffic(model: ModelSpec, hw: HardwareClass, work: Work) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Exposed seconds of tensor, context and expert traffic of each layer group, forward and backward, and of one all-reduce
    of tensor parallelism; (U, G) each."""
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
    once = np.repeat((inner / 2)[:, None], len(forward), axis=1)
    return np.stack(forward, axis=1), np.stack(backward, axis=1), once


def _hop_bytes(model: ModelSpec, work: Work) -> FloatArray:
    ways = work.tensor if work.framework.sequence_parallel else np.ones_like(work.tensor)
    return np.asarray(ELEMENT_BYTES * model.hidden * work.tokens / ways)


@dataclass(frozen=True)
class Sync:
    """Data-parallel traffic of U2 combinations: seconds per micro-batch, a step, a step behind which nothing is computed, of one layer; parameters
    owned, frozen bytes kept."""

    each_s: FloatArray
    once_s: FloatArray
    bare_s: FloatArray
    first_s: FloatArray
    owned: FloatArray
    frozen: FloatArray


@dataclass(frozen=True)
class DataMessages:
    """Bytes of data-parallel messages of a rank, as (dense, experts) arrays: a message is what every rank ends up with
    (gather), starts with (scatter), the tensor itself (reduce). each: a micro-batch; once: a step."""

    gather_each: tuple[FloatArray, FloatArray]
    scatter_each: tuple[FloatArray, FloatArray]
    reduce_each: tuple[FloatArray, FloatArray]
    gather_once: tuple[FloatArray, FloatArray]
    scatter_once: tuple[FloatArray, FloatArray]
    reduce_once: tuple[FloatArray, FloatArray]


def data_messages(
    job: TrainJob,
    framework: Framework,
    zero: IntArray,
    params: tuple[FloatArray, FloatArray, FloatArray],
    passes: FloatArray,
) -> DataMessages:
    """ZeRO-0 all-reduces gradients once a step; 1 scatters them and gathers weights once; 2 scatters them every micro-batch;
    3 also gathers weights, `passes` times every micro-batch (FSDP with stage 2: once). Gradients at most in their own dtype.

    DeepSpeed all-reduces where 1 and 2 scatter. params: dense, experts, frozen.
    """
    dense, experts, frozen = params
    n = framework.number
    per = min(n("reduce_bytes"), train_state_bytes(job, framework).gradients)
    base = frozen if framework.shards_frozen(job.method) else 0.0
    early = n("stage2_gathered") > 0
    gathers = np.where(zero == 3, passes, np.where((zero == 2) & early, 1.0, 0.0))
    gathers_once = np.where((zero == 1) | ((zero == 2) & (not early)), 1.0, 0.0)

    def both(times: FloatArray, bytes_: float, more: FloatArray | float = 0.0) -> tuple[FloatArray, FloatArray]:
        return np.asarray(times * (bytes_ * dense + more)), np.asarray(times * bytes_ * experts)

    reduced = (zero >= 1) & (zero <= 2) & (n("scatter_as_reduce") > 0)
    each, once = np.where(zero >= 2, 1.0, 0.0), np.where(zero == 1, 1.0, 0.0)
    return DataMessages(
        both(gathers, ELEMENT_BYTES, base),
        both(each * ~reduced, per),
        both(each * reduced, per),
        both(gathers_once, ELEMENT_BYTES),
        both(once * ~reduced, per),
        both(np.where(zero == 0, 1.0, once * reduced), per),
    )


def sync_s(
    model: ModelSpec,
    job: TrainJob,
    hw: HardwareClass,
    framework: Framework,
    stages: tuple[RankStage, ...],
    keys: tuple[IntArray, ...],
) -> Sync:
    """keys: index of the combination, tensor, context, data, expert parallel, ZeRO stage, layers per checkpoint (where they matter)."""
    at, tensor, context, data, expert, zero, interval = keys
    dense, experts, frozen, layers, largest, ends = (
        np.max([getattr(s, name)[at] for s in stages], axis=0)
        for name in ("dense", "experts", "frozen", "layers", "largest", "other")
    )
    ranks = data * context
    group = _groups(hw, tensor, ranks)
    spread = np.where(expert > 1, np.maximum(1, ranks * tensor // expert), ranks)
    expert_group = _groups(hw, np.where(expert > 1, expert, tensor), spread)
    calls = np.maximum(1.0, layers)

    among = (
        framework.number("zero_group") or np.inf
    )  # beyond it states are copies, and gradients are summed instead of scattered
    near = _groups(hw, tensor, np.minimum(ranks, among).astype(np.int64))

    def seconds(
        message: tuple[FloatArray, FloatArray],
        times: FloatArray | float = 1.0,
        move: Collective = all_gather_s,
        within: Fabric = group,
    ) -> FloatArray:
        """Of `times` collectives a layer."""
        many = np.maximum(times, 1.0) * calls
        whole = _flat(move(within, (message[0] / many)[:, None])) * (message[0] > 0)
        routed = _flat(move(expert_group, (message[1] / many)[:, None])) * (message[1] > 0)
        return np.asarray(many * (whole + routed))

    passes = gather_passes(model, framework, tensor, interval)
    moved = data_messages(job, framework, zero, (dense, experts, frozen), passes)
    each_gather = seconds(moved.gather_each, np.where(zero == 3, passes, 1.0))
    each = each_gather + seconds(moved.scatter_each, move=reduce_scatter_s)
    each = each + 2 * seconds(moved.reduce_each) * _flat(group.all_reduce)
    gathered = seconds(moved.gather_once, within=near)
    hidden = framework.number("gather_hidden")
    once = hidden * gathered + seconds(moved.scatter_once, move=reduce_scatter_s) * np.where(ranks > among, 2, 1)
    once = once + 2 * seconds(moved.reduce_once) * _flat(group.all_reduce)
    again_each, again_once = _allocated_s(framework, moved, (dense + experts, largest, ends), zero)
    several = (ranks > 1).astype(float)
    each, once = each + again_each * several, once + again_once * several
    bucket = np.minimum(dense + experts, framework.number("bucket_elements"))
    copies = reduce_passes_s(hw.gpu, framework, zero, dense + experts, bucket) * several
    each, once = each + copies * (zero >= 2), once + copies * (zero < 2)
    split = np.where(zero >= 1, np.minimum(ranks, among), 1)
    owned = dense / split + experts / np.where(zero >= 1, spread, 1)
    first = np.where(zero == 3, each_gather / (passes * calls), 0.0)
    return Sync(each, once, (1 - hidden) * gathered, first, owned, frozen_kept(job, framework, zero, frozen, ranks))


def _allocated_s(
    framework: Framework, moved: DataMessages, params: tuple[FloatArray, FloatArray, FloatArray], zero: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Seconds of first touch of what gathers and scatters allocate, of a micro-batch and once a step.

    A message is a bucket, or a layer and the ends (embedding and head) where weights are gathered by module. params: of all,
    of the largest layer, of the ends.
    """
    n, (total, largest, ends) = framework.number, params
    bucket = np.minimum(total, n("bucket_elements")) if n("bucket_elements") else largest

    def of(message: tuple[FloatArray, FloatArray], copies: str, modules: npt.ArrayLike) -> FloatArray:
        whole = message[0] + message[1]
        per = whole / np.maximum(total, 1.0)
        split = fresh_s(framework, per * (total - ends), ELEMENT_BYTES * largest)
        split = split + fresh_s(framework, per * ends, ELEMENT_BYTES * ends)
        return np.asarray(n(copies) * np.where(modules, split, fresh_s(framework, whole, per * bucket)))

    by_module = not n("bucket_elements")
    each = of(moved.gather_each, "gather_fresh", np.ones_like(zero)) + of(
        moved.scatter_each, "scatter_fresh", by_module
    )
    once = of(moved.gather_once, "gather_fresh", by_module) + of(moved.scatter_once, "scatter_fresh", by_module)
    return each, once


def step_messages(model: ModelSpec, job: TrainJob, framework: Framework, rows: TrainRows) -> dict[str, FloatArray]:
    """Bytes of messages of one rank in a step, by collective; of the fullest pipeline stage. Volume on the wire: collectives.py.

    Tensor parallel: all-reduces of 2 b s h a layer, two forward, two backward, and two again when it is recomputed, but for
    the last of a checkpoint where recomputation stops early; logits gathered where they are not split. Pipeline: 2 b s h forward and backward at each boundary.
    """
    combos, at = compact(
        rows.tensor_parallel, rows.pipeline_parallel, rows.context_parallel, rows.expert_parallel, rows.micro_batch_size,
        rows.split,
    )  # fmt: skip
    cut = stages_of(model, job.seq_len, combos[1], framework.uneven_stages, combos[5], rows.splits)
    stages = rank_stages(model, job, framework, (combos[0], combos[2], combos[3], combos[4]), cut)
    dense, experts, frozen, layers = (
        np.max([getattr(s, name)[at] for s in stages], axis=0) for name in ("dense", "experts", "frozen", "layers")
    )
    m, interval = rows.gradient_accumulation_steps, rows.checkpoint_interval
    passes = gather_passes(model, framework, rows.tensor_parallel, interval)
    moved = data_messages(job, framework, rows.zero_stage, (dense, experts, frozen), passes)
    several = rows.data_parallel * rows.context_parallel > 1

    def step(each: tuple[FloatArray, FloatArray], once: tuple[FloatArray, FloatArray]) -> FloatArray:
        return np.asarray(((each[0] + each[1]) * m + once[0] + once[1]) * several)

    hidden = ELEMENT_BYTES * model.hidden * rows.micro_batch_size * float(job.seq_len) / rows.context_parallel
    stop = framework.number("early_stop") * isinstance(model.layers[-1].mlp, DenseMlp)
    stops = stop * (rows.zero_stage < framework.number("early_stop_below"))
    again = np.where(interval > 0, 2.0 - stops / np.maximum(1, interval), 0.0)
    inner = (4.0 + again) * layers * hidden * m * (rows.tensor_parallel > 1)
    whole = not framework.number("logits_split") and not (
        model.tie_embeddings and framework.number("tied_logits_split")
    )
    logits = hidden / model.hidden * model.vocab * m * (rows.tensor_parallel > 1) * whole
    return {
        "all-gather": step(moved.gather_each, moved.gather_once) + logits,
        "reduce-scatter": step(moved.scatter_each, moved.scatter_once),
        "all-reduce": step(moved.reduce_each, moved.reduce_once) + inner,
        "p2p": 2.0 * hidden * m * (rows.pipeline_parallel > 1),
    }


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


def offload_s(
    hw: HardwareClass, framework: Framework, rows: TrainRows, owned: FloatArray, frozen: FloatArray
) -> FloatArray:
    """Gradients down and weights up over the host link, the CPU optimizer, and weights up for forward and backward of every micro-batch.

    owned: parameters whose states the rank keeps; frozen: bytes of those it does not train. The CPU optimizer is shared by the
    ranks of a machine.
    """
    n = framework.number
    rate = host_link_gb_per_s(hw.gpu) * GB
    per_machine = np.minimum(rows.world, hw.gpus_per_node)
    step = 2 * ELEMENT_BYTES * owned / rate + owned * per_machine / n("cpu_adam_params_per_s")
    both = rows.offload == OFFLOADS.index("optimizer+parameters")
    weights = np.where(both, 2 * (ELEMENT_BYTES * owned + frozen) / rate * rows.gradient_accumulation_steps, 0.0)
    return np.asarray(np.where(rows.offload > 0, step + weights, 0.0))

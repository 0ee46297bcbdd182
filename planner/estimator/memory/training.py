"""Memory of training layouts, many rows at once: bytes on the worst rank at the worst moment, and host memory.

    backward = weights + optimizer + buffers + max(gradients held + stored + max(logits + next, live + layers), gradients + live + layers)
    step     = weights + gradients + optimizer + temporary of the step
    heap     = what a CPU process holds at the step beyond these: buffers + stored + ... of backward, and the optimizer's temporaries
    load     = what a rank holds while the checkpoint is read
    peak     = max of the three + heap + context, communicators, fragmentation

The backward of a ZeRO-3 head beside its live parameters: its gradient whole, once more where it is reduced, 16-bit logits twice.
layers: unsharded weights and gradients of the layers at work, next: of the one that backward begins with.
stored: 1F1B keeps min(P - stage, m) micro-batches. States: train_states.py; activations: train_activations.py.
Measured error: see planner accuracy --training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from planner.engines.training import Framework
from planner.errors import PlannerError
from planner.estimator.memory.train_host import host_bytes
from planner.estimator.memory.train_ranks import RankStage, rank_stages
from planner.estimator.memory.train_states import (
    PLAIN_BYTES,
    StateBytes,
    frozen_kept,
    train_state_bytes,
)
from planner.estimator.memory.train_worst import BACKWARD, LOAD, STEP, Worst, there
from planner.estimator.train_stages import Cut, floor_stages, piece_stages, stages_of
from planner.models.spec import ModelSpec
from planner.request import OFFLOADS, TrainJob
from planner.space.hardware_classes import HardwareClass
from planner.space.train_rows import IntArray, TrainRows, compact
from planner.units import GIB

FloatArray = npt.NDArray[np.float64]
HEAD_LOGITS_BYTES = 4.0  # 16-bit logits and their gradient


@dataclass(frozen=True)
class TrainMemory:
    """Bytes on the worst rank at the worst moment, equal-length arrays. worst_moment: 0 load, 1 backward, 2 step.

        peak = peak_weights + peak_gradients + peak_optimizer + activations + logits + buffers + runtime

    All of the worst stage. These parts are what is there at the worst moment (buffers: all its other tensors; while loading all tensors
    are weights). weights, optimizer: between steps; gradients: after backward. heap, a part of runtime: held at the step beyond the
    tensors' peak (CPU). steady: between steps. usable_bytes: what the GPU offers. host_ram_bytes: per machine, a hard constraint.
    """

    weights_bytes: FloatArray
    gradients_bytes: FloatArray
    optimizer_bytes: FloatArray
    peak_weights_bytes: FloatArray
    peak_gradients_bytes: FloatArray
    peak_optimizer_bytes: FloatArray
    activations_bytes: FloatArray
    logits_bytes: FloatArray
    buffers_bytes: FloatArray
    runtime_bytes: FloatArray
    heap_bytes: FloatArray
    steady_bytes: FloatArray
    peak_bytes: FloatArray
    usable_bytes: FloatArray
    worst_moment: IntArray
    host_ram_bytes: FloatArray

    @property
    def fits(self) -> npt.NDArray[np.bool_]:
        """Rows whose peak the GPU holds (host memory is judged against the machine by the caller)."""
        return np.asarray(self.peak_bytes <= self.usable_bytes)


@dataclass(frozen=True)
class _States:
    """Bytes of one stage that do not depend on checkpoints: by part, and at the moments of load and step.

    temporary: of an optimizer that is not fused. layers: unsharded weights and gradients of the layers at work, beside the buffers that are there all the time.
    """

    weights: FloatArray
    gradients: FloatArray
    optimizer: FloatArray
    buffers: FloatArray
    layers: FloatArray
    held: FloatArray
    load: FloatArray
    step: FloatArray
    temporary: FloatArray


@dataclass(frozen=True)
class _Rows:
    """Columns of N rows of one framework that the parts need."""

    combo: IntArray
    shards: FloatArray
    expert_shards: FloatArray
    zero: IntArray
    micro_batches: IntArray
    stages: IntArray
    interval: IntArray
    offload: IntArray
    alone: npt.NDArray[np.bool_]


def _sharded(dense: FloatArray, experts: FloatArray, rows: _Rows, stage: int) -> FloatArray:
    """Parameters a rank holds of a state that is sharded from ZeRO `stage` on."""
    on = rows.zero >= stage
    return np.asarray(dense / np.where(on, rows.shards, 1.0) + experts / np.where(on, rows.expert_shards, 1.0))


def _states(stage: RankStage, rows: _Rows, per: StateBytes, job: TrainJob, framework: Framework) -> _States:
    n, at = framework.number, rows.combo
    dense, experts = stage.dense[at], stage.experts[at]
    other = stage.other[at] if job.method == "full" else 0.0
    sharded = _sharded(dense, experts, rows, framework.weight_stage)
    frozen = frozen_kept(job, framework, rows.zero, stage.frozen[at], rows.shards)
    on_cpu = rows.offload > 0
    weights = np.where(rows.offload == OFFLOADS.index("optimizer+parameters"), 0.0, per.weights * sharded + frozen)
    gradients = per.gradients * _sharded(dense, experts, rows, 2) * np.where(on_cpu & (rows.zero >= 2), 0.0, 1.0)
    gradients = gradients * n("trained_share")
    if n("gradients_in_backward"):  # one layer's or the head's at a time (optimizer in backward)
        gradients = np.minimum(gradients, per.gradients * np.maximum(stage.largest[at], stage.head[at]))
    saved = np.where(rows.zero == 3, n("stage3_saving_bytes"), 0.0)
    optimizer = (per.optimizer - saved) * _sharded(dense, experts, rows, 1)
    optimizer = optimizer + (per.other_optimizer - per.optimizer) * other / np.where(rows.zero >= 1, rows.shards, 1.0)
    optimizer = np.where(on_cpu, 0.0, optimizer * n("trained_share"))
    buffers, layers = _buffers(stage, rows, per, job, framework, params=(dense, experts))
    hold = ((n("gradients_held") > 0) & (rows.zero >= n("held_from_stage"))) | (rows.micro_batches > 1)
    step = weights + gradients + optimizer + np.where(on_cpu, 0.0, per.step * sharded * n("trained_share"))
    temporary = n("optimizer_temporary_bytes") * _sharded(dense, experts, rows, 1)
    load = _load_bytes(stage, rows, per, job, framework)
    held = np.where(hold, gradients, 0.0)
    return _States(weights, gradients, optimizer, buffers, layers, held, load, step, temporary)


def _kept_bytes(stage: RankStage, at: IntArray, rows: TrainRows, framework: Framework) -> tuple[FloatArray, FloatArray]:
    """Activations that wait for their backward, and those alive in the backward of one checkpoint, per row."""
    flight = np.minimum(rows.pipeline_parallel - stage.position[at], rows.gradient_accumulation_steps)
    interval, stash = rows.checkpoint_interval, framework.number("offloaded_stash")
    segments, kept = np.ceil(stage.layers[at] / np.maximum(interval, 1)), stage.kept[at]
    if stash:  # the rest waits in host memory
        segments, kept = np.minimum(segments, stash), np.minimum(kept, stash * stage.kept_layer[at])
    stored = flight * np.where(interval > 0, segments * stage.checkpoint[at], kept)
    return stored, (interval + framework.number("live_layers")) * stage.kept_layer[at]


def _gathered_bytes(
    stage: RankStage, at: IntArray, rows: TrainRows, framework: Framework
) -> tuple[FloatArray, FloatArray]:
    """Unsharded weights of stage 3, per row: more of them in the backward of a checkpoint over several layers, all of which
    recomputation gathers; of the layer that is prefetched when the logits are alive."""
    n, gathered = (
        framework.number,
        stage.gathered[at] * (rows.zero_stage == 3) * (framework.number("max_live_elements") == 0),
    )
    more = np.maximum(rows.checkpoint_interval - n("gathered_layers"), 0.0)
    return more * gathered, max(n("gathered_layers") - 1, 0.0) * gathered


def _buffers(
    stage: RankStage,
    rows: _Rows,
    per: StateBytes,
    job: TrainJob,
    framework: Framework,
    *,
    params: tuple[FloatArray, FloatArray],
) -> tuple[FloatArray, FloatArray]:
    """Unsharded copies and buckets that are there all the time (root group, live parameters, autocast copies, reduce buckets),
    and unsharded weights and gradients of the layers at work."""
    n, at = framework.number, rows.combo
    dense, experts = params
    full = job.method == "full"
    each = PLAIN_BYTES if full or job.method == "qlora" else n("frozen_bytes")
    gathered, largest = stage.gathered[at], stage.largest[at]
    root = PLAIN_BYTES * stage.other[at]
    gradients = n("gathered_gradient_layers") * PLAIN_BYTES * largest if full else np.zeros_like(largest)
    whole = PLAIN_BYTES * (dense + experts) if full else stage.frozen[at]
    working = n("gathered_layers") * gathered + gradients
    if n("root_gathered"):
        fixed, layers = root, working
    else:
        live = np.minimum(each * n("max_live_elements"), whole)
        fixed, layers = live if n("max_live_elements") else working, np.zeros_like(root)
    total, layered = np.where(rows.zero == 3, fixed, 0.0), np.where(rows.zero == 3, layers, 0.0)
    if n("stage2_gathered"):
        total = total + np.where(rows.zero == 2, whole, 0.0)
        layered = layered + np.where(rows.zero == 2, gradients, 0.0)
    elif n("bucket_elements"):
        total = total + each * _bucket_elements(framework, rows.zero, dense + experts)
    whole_gradients = np.where(rows.micro_batches > 1, n("accumulated_bytes"), 0.0)
    frozen = 0.0 if full or not n("flat_gradients") else np.where(rows.zero == 3, stage.frozen[at], 0.0)
    frozen = frozen / np.where(whole_gradients > 0, 1.0, rows.shards)  # FSDP1: one flat gradient of trained and frozen
    unsharded = (
        frozen
        + (per.extra + whole_gradients) * (dense + experts)
        + np.where(rows.alone, 0.0, min(n("ddp_bucket_bytes"), per.gradients) * (dense + experts))
    )
    copies = (rows.zero == 3) | (
        (rows.zero == 2) & (n("stage2_gathered") > 0)
    )  # FSDP gathers into a buffer, of one rank too
    none = rows.alone & ~copies
    return np.asarray(np.where(none, 0.0, total) + unsharded), np.asarray(np.where(none, 0.0, layered))


def _bucket_elements(framework: Framework, zero: IntArray, params: FloatArray) -> FloatArray:
    """Elements of DeepSpeed's reduce buckets, two in stage 2, of which a process without bucket_whole holds what is written.

    There the second bucket is written when the first is full, and stage 1 moves its gradients into the bucket.
    """
    size, each = framework.number("bucket_elements"), np.where(zero == 2, 2.0, 1.0)
    if framework.number("bucket_whole"):
        return np.asarray(np.where(zero >= 1, each * size, 0.0))
    return np.asarray(np.where(zero >= 2, np.minimum(each * size, params), 0.0))


def _load_bytes(stage: RankStage, rows: _Rows, per: StateBytes, job: TrainJob, framework: Framework) -> FloatArray:
    """GPU bytes while loading: whole weights below stage 3; a 4-bit base that is not sharded is whole on every GPU.

    Offloaded parameters are loaded into host memory; a 4-bit base is quantised on the GPU before it goes there.
    """
    at, n = rows.combo, framework.number
    if job.method == "full":
        whole = per.weights * (stage.dense[at] + stage.experts[at])
    else:
        whole = stage.frozen[at] + per.weights * stage.dense[at]
    sharded = rows.zero >= framework.weight_stage
    if job.method == "qlora" and (n("load_whole") or not n("quantised_sharded")):
        sharded = np.zeros_like(sharded)
    layer = PLAIN_BYTES * stage.largest[at]
    on_host = sharded & (rows.offload == OFFLOADS.index("optimizer+parameters")) & (job.method != "qlora")
    return np.asarray(np.where(on_host, layer, np.where(sharded, whole / rows.shards + layer, whole)))


def _rows_of(rows: TrainRows, combo: IntArray, framework: Framework) -> _Rows:
    shards = rows.data_parallel * rows.context_parallel
    spread = np.where(rows.expert_parallel > 1, shards * rows.tensor_parallel / rows.expert_parallel, shards)
    spread = spread if framework.number("experts_sharded") else np.ones_like(spread)
    return _Rows(
        combo, shards.astype(float), np.maximum(spread, 1.0), rows.zero_stage, rows.gradient_accumulation_steps,
        rows.pipeline_parallel, rows.checkpoint_interval, rows.offload, shards == 1,
    )  # fmt: skip


def _one_framework(
    model: ModelSpec, job: TrainJob, hw: HardwareClass, framework: Framework, rows: TrainRows, cut: Cut
) -> dict[str, FloatArray]:
    framework = framework.on(hw.gpu)
    combos, at = compact(
        rows.tensor_parallel, rows.pipeline_parallel, rows.context_parallel, rows.expert_parallel, rows.micro_batch_size,
        rows.split,
    )  # fmt: skip
    tensor, pipeline, context, expert, micro, split = combos
    several = (rows.gradient_accumulation_steps > 1).astype(np.int64)
    _, group = compact(at, rows.data_parallel, rows.zero_stage, rows.offload, several)
    first = np.empty(int(group.max()) + 1, dtype=np.int64)
    first[group[::-1]] = np.arange(len(rows) - 1, -1, -1)
    few, n = rows.take(first), framework.number
    view, per = _rows_of(few, at[first], framework), train_state_bytes(job, framework)
    if cut == "floor":
        shape = floor_stages(model, pipeline, ends=False)
    elif cut == "piece":
        shape = piece_stages(model, pipeline, split, rows.splits)
    else:
        shape = stages_of(model, job.seq_len, pipeline, framework.uneven_stages, split, rows.splits)
    chosen = rank_stages(model, job, framework, (tensor, context, expert, micro), shape)
    chosen = chosen[: len(chosen) if pipeline.max() > 1 else 1]
    parts = [_states(stage, view, per, job, framework) for stage in chosen]
    worst = _peaks(chosen, parts, (at, group), rows, framework, model.tie_embeddings)
    place, keeps = worst.stage * len(few) + group, n("gradients_held") or n("steady_gradients")

    def gather(values: Callable[[_States], FloatArray]) -> FloatArray:
        return np.asarray(np.concatenate([values(p) for p in parts])[place])

    fixed = (n("context_gib") + np.where(few.world > 1, n("nccl_gib"), 0.0)) * GIB
    runtime = fixed[group] + worst.heap + n("fragmentation") * (worst.tensors + worst.heap)
    weights, optimizer = gather(lambda p: p.weights), gather(lambda p: p.optimizer)
    loading = worst.moment == LOAD
    there_weights, there_optimizer = np.where(loading, worst.tensors, weights), np.where(loading, 0.0, optimizer)
    named = there_weights + there_optimizer + worst.gradients + worst.activations + worst.logits
    return {
        "weights": weights,
        "gradients": gather(lambda p: p.gradients),
        "optimizer": optimizer,
        "peak_weights": there_weights,
        "peak_gradients": worst.gradients,
        "peak_optimizer": there_optimizer,
        "activations": worst.activations,
        "logits": worst.logits,
        "buffers": np.maximum(worst.tensors - named, 0.0),
        "steady": gather(lambda p: p.weights + p.optimizer + (p.gradients if keeps else 0.0)),
        "runtime": runtime,
        "heap": worst.heap,
        "peak": worst.tensors + runtime,
        "moment": worst.moment,
        "host": host_bytes(model, job, hw, framework, few)[group],
    }


def _peaks(
    stages: Sequence[RankStage],
    parts: Sequence[_States],
    places: tuple[IntArray, IntArray],
    rows: TrainRows,
    framework: Framework,
    tied: bool,
) -> Worst:
    """The worst moment of the worst stage, per row.

    places: index of each row into the stages' combinations and into the states. tied: head and embedding are one, and the
    head's gradient waits for the embedding's.
    """
    at, group = places
    n = framework.number
    live_rules = (n("max_live_elements") > 0) & (rows.zero_stage == 3)
    waits = n("head_gradient_held") or (tied and n("tied_gradient_held"))
    worst: Worst | None = None
    for number, (stage, part) in enumerate(zip(stages, parts, strict=True)):
        stored, live = _kept_bytes(stage, at, rows, framework)
        more, upcoming = _gathered_bytes(stage, at, rows, framework)
        busy = live + part.layers[group] + more + (PLAIN_BYTES * stage.head[at] if waits else 0.0)
        head = (HEAD_LOGITS_BYTES / n("logits_bytes")) * stage.logits[at] + 2 * PLAIN_BYTES * stage.head[
            at
        ] * live_rules
        begins = np.maximum(stage.logits[at] + upcoming, head)
        first = np.maximum(begins, busy)
        early, late = part.held[group] + stored + first, part.gradients[group] + busy
        backward = (part.weights + part.optimizer + part.buffers)[group] + np.maximum(early, late)
        still = np.maximum(part.load, part.step)[group]
        kept = n("heap_kept") * (part.buffers[group] + stored + first) + part.temporary[group]
        tensors = np.maximum(still, backward)
        moment = np.where(backward >= still, BACKWARD, np.where(part.step >= part.load, STEP, LOAD)[group])
        found = Worst(
            tensors,
            np.maximum(part.step[group] + kept - tensors, 0.0),
            moment,
            np.full(len(rows), number),
            *there(moment, (early, late), (begins, busy), (part.held[group], part.gradients[group]), (stored, live), stage.logits[at]),
        )  # fmt: skip
        worst = found if worst is None else worst.where(found.tensors > worst.tensors, found)
    if worst is None:
        raise PlannerError("a model without pipeline stages has no memory")
    return worst


def training_memory(
    model: ModelSpec,
    job: TrainJob,
    hw: HardwareClass,
    frameworks: Sequence[Framework],
    rows: TrainRows,
    *,
    cut: Cut = "split",
) -> TrainMemory:
    """Memory of each row; equation and source in the module's docstring. rows.framework indexes `frameworks`.

    cut: "floor" = no split of the layers over the stages needs less; "piece" = of one stage alone, rows.splits holding
    (number of the stage, its layers).
    """
    size = len(rows)
    names = [
        f.name.removesuffix("_bytes")
        for f in fields(TrainMemory)
        if f.name not in ("usable_bytes", "worst_moment", "host_ram_bytes")
    ]
    columns = {k: np.zeros(size) for k in (*names, "moment", "host")}
    for number, framework in enumerate(frameworks):
        mask = rows.framework == number
        if mask.all() and size:
            columns.update(_one_framework(model, job, hw, framework, rows, cut))
        elif mask.any():
            for key, value in _one_framework(model, job, hw, framework, rows.take(mask), cut).items():
                columns[key][mask] = value
    usable = np.full(size, hw.gpu.usable_gib * GIB)
    parts = {f"{k}_bytes": columns[k] for k in names}
    return TrainMemory(
        **parts,
        usable_bytes=usable,
        worst_moment=columns["moment"].astype(np.int64),
        host_ram_bytes=columns["host"],
    )

"""`planner validate --level dry`: what a plan predicts beside what its transformers model counts, without hardware.

One rank of the planned sharding runs on fake tensors: shapes and dtypes are real, nothing is stored, no weight is loaded.
Counted are tensors alone. From the planned total the CUDA context, communicators and fragmentation of training.yaml are
taken off before it is compared: tensors = (total - context - communicators) / (1 + fragmentation), less what the heap of a CPU process keeps.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.engines.training import Framework, framework
from planner.errors import InvalidValueError, NoPlanError
from planner.models.flops import decode_flops, matmul_flops_per_token, prefill_flops
from planner.models.precision import Precision, kv_dtype, precision
from planner.models.spec import Attention, DenseMlp, ModelSpec
from planner.plan import Deployment, MemoryUse, Plan, TrainSettings
from planner.request import TrainJob
from planner.space.hardware_classes import HardwareClass
from planner.space.train_rows import TrainRows
from planner.units import GIB
from planner.validate.dry_model import EXPERT_TYPES, raw_config, spec_of, torch_modules
from planner.validate.dry_rank import Rank, Stage, refuse, stages_of_plan, stops_early, words
from planner.validate.planned import planned_gpu

GIGA, TERA = 1e9, 1e12
TOLERANCE_PERCENT = 5.0
PART_OF_ANOTHER = ("the rest of the peak",)


@dataclass(frozen=True)
class Part:
    """One number predicted and counted, in `unit`. judged: it goes into the plan's error_percent."""

    name: str
    unit: str
    predicted: float
    counted: float
    judged: bool = True

    @property
    def error_percent(self) -> float | None:
        """(predicted - counted) / counted in percent; None when nothing was counted."""
        return (self.predicted / self.counted - 1) * 100 if self.counted else None


@dataclass(frozen=True)
class DryRun:
    """The comparison. notes: what was counted and what was not, in words. peak_parts_gib: counted peak by kind."""

    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    peak_parts_gib: dict[str, float]

    @property
    def beyond(self) -> tuple[str, ...]:
        """Judged parts that differ by more than TOLERANCE_PERCENT, but for those that are part of another."""
        found = [p for p in self.parts if p.judged and p.name not in PART_OF_ANOTHER and p.error_percent is not None]
        return tuple(p.name for p in found if abs(p.error_percent or 0.0) > TOLERANCE_PERCENT)

    def validation(self) -> dict[str, Any]:
        """The tree that goes into Plan.validation."""
        shown = [p for p in self.parts if p.judged]
        return {
            "level": "dry",
            "measured": {f"{p.name} ({p.unit})": round(p.counted, 4) for p in shown},
            "error_percent": {p.name: round(p.error_percent, 2) for p in shown if p.error_percent is not None},
            "tolerance_percent": TOLERANCE_PERCENT,
            "beyond_tolerance": list(self.beyond),
        }


def dry_run(plan: Plan) -> DryRun:
    """Count the winner of a plan and set it beside what the plan predicts.

    Raises NoPlanError (nothing to count), MissingExtraError (torch or transformers absent), InvalidValueError for a
    configuration that is not counted yet, ModelConfigError when the model's config cannot be found.
    """
    dep, memory = plan.deployment, plan.memory
    if dep is None or memory is None:
        raise NoPlanError(
            "the plan is infeasible", "there is no deployment to count", "Relax what its explanation names."
        )
    raw, spec = raw_config(plan), spec_of(plan)
    counted = (spec.params_total, len(spec.layers), spec.hidden)
    if counted != (plan.model.params_total, plan.model.layers, plan.model.hidden):
        raise InvalidValueError(
            f"the request of the plan names another model than {plan.model.name}",
            f"request.model is {plan.request.get('model')!r}, with {spec.params_total / 1e9:.2f}e9 parameters instead of "
            f"{plan.model.params_total / 1e9:.2f}e9",
            "Solve again, or mend request.model.",
        )
    refuse(dep, str(raw["model_type"]))
    collecting = gc.isenabled()
    gc.enable()  # the command line turns it off; cycles of dead tensors would count as alive
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch_modules()
            if dep.train is not None:
                gpu, catalog = planned_gpu(plan, dep)
                machine = HardwareClass(gpu, dep.gpus, catalog.links[gpu.default_link], None, ())
                states = planned_states_gib(spec, dep, dep.train, machine)
                tensors = planned_tensors_gib(framework(dep.engine).on(gpu), dep, memory, states["heap"])
                return _training(raw, spec, dep, dep.train, {**states, "tensors": tensors})
            return _serving(raw, spec, plan, dep, memory)
    finally:
        if not collecting:
            gc.disable()


def _training(
    raw: dict[str, Any], spec: ModelSpec, dep: Deployment, train: TrainSettings, planned: dict[str, float]
) -> DryRun:
    """planned: GiB of the states, and of the tensors that the plan predicts at the peak."""
    from planner.validate.dry_flops import training_flops

    tensors, weights, optimizer = planned["tensors"], planned["weights"], planned["optimizer"]
    found = [(stage, *_counted(raw, stage)) for stage in stages_of_plan(dep, train, len(spec.layers))]
    stage, counted, how = max(found, key=lambda f: f[1].peak)
    rank = stage.rank
    parts = [
        Part("weights", "GiB", weights, counted.weights / GIB),
        Part("gradients after backward", "GiB", planned["gradients"], counted.gradients / GIB),
        Part("optimizer", "GiB", optimizer, counted.optimizer / GIB),
        Part("the rest of the peak", "GiB", tensors - weights - optimizer, counted.rest / GIB),
        Part("tensors at the peak", "GiB", tensors, counted.peak / GIB),
        Part(
            "FLOPs of a micro-batch", "TFLOP",
            planned_step_flops(spec, train, dep.tensor_parallel, stage) / TERA, training_flops(raw, stage) / TERA,
        ),
        *_messages(spec, dep, train, found),
    ]  # fmt: skip
    where = "" if dep.pipeline_parallel == 1 else f" of the stage of {stage.layers} layers that peaks highest"
    notes = [
        f"Counted: one of {dep.gpus} ranks{where}, {how}, {words(rank)}.",
        "The rest of the peak: activations, logits, gathered weights, buffers and the gradients alive at that moment.",
        "FLOPs: causal attention as if it were full, on both sides; recomputation ends early, at the last tensor it needs (DeepSpeed ZeRO-3: runs whole).",
        "Not counted: CUDA context, communicators, fragmentation, kernels' workspace, temporaries of the optimizer step.",
    ]
    notes += [_STAND_INS[rank.engine]] if rank.engine in _STAND_INS else []
    notes += _more_notes(dep, train, raw, rank)
    notes += _windows(spec, train.seq_len)
    return DryRun(tuple(parts), tuple(notes), {k: v / GIB for k, v in counted.parts.items()})


def _counted(raw: dict[str, Any], stage: Stage) -> tuple[Any, str]:
    """The count of one stage, and in words how it was reached."""
    from planner.validate.dry_train import count, layers_to_count, line, live_weights

    layers, rank = stage.layers, stage.rank
    runs = layers_to_count(layers, rank)
    live = live_weights(raw, layers, rank)
    counted = line({n: count(raw, n, rank, live) for n in runs}, layers)
    how = (
        f"all {layers} layers" if len(runs) == 1 else f"{runs[0]} and {runs[1]} layers and a straight line to {layers}"
    )
    return counted, how


def _messages(
    spec: ModelSpec, dep: Deployment, train: TrainSettings, found: Sequence[tuple[Stage, Any, str]]
) -> list[Part]:
    """Bytes of a rank's messages per step by collective, predicted and counted."""
    planned = planned_messages(spec, dep, train)
    parts = []
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        seen = max(f[1].traffic.get(kind, 0.0) for f in found) * train.gradient_accumulation_steps
        derived = max(f[1].derived.get(kind, 0.0) for f in found)
        derived_each = max(f[1].derived_each.get(kind, 0.0) for f in found) * train.gradient_accumulation_steps
        total = seen + derived + derived_each
        if max(planned.get(kind, 0.0), total) > 0:
            parts.append(Part(f"{kind} of a step", "GiB", planned.get(kind, 0.0) / GIB, total / GIB))
    return parts


def planned_messages(spec: ModelSpec, dep: Deployment, train: TrainSettings) -> dict[str, float]:
    """step_messages of the estimator for this plan."""
    from planner.estimator.time.train_traffic import step_messages

    job, rows = _job_and_row(dep, train)
    found = step_messages(spec, job, framework(dep.engine), rows)
    return {kind: float(values[0]) for kind, values in found.items()}


def _job_and_row(dep: Deployment, train: TrainSettings) -> tuple[TrainJob, TrainRows]:
    """What the estimators take, of a plan."""
    from planner.request import OFFLOADS

    job = TrainJob(
        method=train.method, seq_len=train.seq_len, optimizer=train.optimizer, precision=dep.precision,
        lora_rank=train.lora_rank or 16, lora_targets=train.lora_targets or ("attention", "mlp"), chunked_loss=train.chunked_loss,
    )  # fmt: skip
    row = (0, dep.tensor_parallel, dep.pipeline_parallel, dep.context_parallel, dep.data_parallel, dep.expert_parallel,
           train.zero_stage, train.micro_batch_size, train.gradient_accumulation_steps, train.checkpoint_interval,
           OFFLOADS.index(train.offload))  # fmt: skip
    rows = TrainRows.of([row])
    return job, rows.cut((train.layers_per_stage,), np.array([0])) if train.layers_per_stage else rows


def _more_notes(dep: Deployment, train: TrainSettings, raw: dict[str, Any], rank: Rank) -> list[str]:
    """What holds for some plans only."""
    found = []
    if raw.get("model_type") in EXPERT_TYPES:
        found.append("Experts run as grouped products: every token's rows are there, however they are routed.")
    if train.offload != "none":
        found.append("Offloaded states are taken off the device; buffers for moving them are not counted.")
    if dep.tensor_parallel > 1:
        found.append(
            "Tensor parallelism: the layers of one rank's shapes, all-reduces around them as AutoTP makes them."
        )
    if dep.pipeline_parallel > 1:
        found.append(f"Pipeline: {rank.in_flight} micro-batches run forward before the first backward.")
    return found


_STAND_INS = {
    "deepspeed": "DeepSpeed itself does not run on fake tensors: its partitions, buckets, gathered parameters and messages of "
    "the data-parallel ranks follow from its own rules, held against DeepSpeed on two CPU ranks.",
    "ddp": "DDP's buckets are taken as large as the gradients; its messages are the gradients that were counted.",
}


def planned_states_gib(
    spec: ModelSpec, dep: Deployment, train: TrainSettings, machine: HardwareClass
) -> dict[str, float]:
    """Weights and optimizer between steps, gradients after backward (the plan has what is there at the worst moment), and what a process of
    a CPU plan holds at the step beyond its tensors' peak (memory/training.py, heap; 0 on GPUs)."""
    from planner.estimator.memory.training import training_memory

    job, rows = _job_and_row(dep, train)
    found = training_memory(spec, job, machine, [framework(dep.engine)], rows)
    return {
        name: float(getattr(found, f"{name}_bytes")[0]) / GIB for name in ("weights", "gradients", "optimizer", "heap")
    }


def planned_tensors_gib(stack: Framework, dep: Deployment, memory: MemoryUse, heap_gib: float) -> float:
    """(total - context - communicators) / (1 + fragmentation) - heap of a training plan, constants of the framework on the planned
    device."""
    n = stack.number
    fixed = n("context_gib") + (n("nccl_gib") if dep.gpus > 1 else 0.0)
    return (memory.total_gib - fixed) / (1 + n("fragmentation")) - heap_gib


def planned_step_flops(spec: ModelSpec, train: TrainSettings, tensor: int, stage: Stage) -> float:
    """Forward and backward of a micro-batch on one rank of a stage; attention without its mask.

    Full training: 3 x forward; adapters: 2 x the matrices and 3 x attention. Recomputed layers once more, but for the last
    matrix of each checkpoint (dense, full training; not where the framework's stage recomputes them whole).
    """
    tokens, full = train.seq_len, train.method == "full"
    share = stage.layers / len(spec.layers) / tensor
    attention = prefill_flops(spec, tokens).attention * 2 * tokens / (tokens + 1) * share
    body = matmul_flops_per_token(spec, head=False) * tokens * share
    head = 2.0 * spec.vocab * spec.hidden * tokens / tensor * stage.rank.last
    again, mlp = 0.0, spec.layers[-1].mlp
    if train.checkpoint_interval:
        segments = -(-stage.layers // train.checkpoint_interval)
        last = mlp.intermediate if isinstance(mlp, DenseMlp) and full and stops_early(stage.rank) else 0
        tail = 2.0 * spec.hidden * last * tokens / tensor
        again = body + attention - tail * segments
    again += head if train.chunked_loss else 0.0
    return float(train.micro_batch_size * ((3 if full else 2) * (body + head) + 3 * attention + again))


def _serving(raw: dict[str, Any], spec: ModelSpec, plan: Plan, dep: Deployment, memory: MemoryUse) -> DryRun:
    from planner.validate.dry_flops import serving_flops
    from planner.validate.dry_serve import count_serving

    serve = dep.serve
    if serve is None:
        raise InvalidValueError("the plan has no serving settings", "deployment.serve is empty", "Solve again.")
    ranks, layers = dep.tensor_parallel, len(spec.layers)
    served = count_serving(raw, layers, ranks=ranks, tokens=serve.max_num_batched_tokens, sequences=serve.max_num_seqs)
    prompt = int(dict(plan.request.get("workload") or {}).get("input_tokens") or min(1024, serve.max_model_len))
    prefill, decode = serving_flops(raw, layers, ranks=ranks, tokens=prompt)
    stored, cache = precision(dep.precision), kv_dtype(dep.kv_cache_dtype)
    cached = served.cached_token * cache.bytes_per_element / 2 * memory.kv_cache_tokens
    weights = served.layer_weights * _shrink(stored) + served.other_weights
    full = prefill_flops(spec, prompt)
    parts = (
        Part("weights", "GiB", memory.weights_gib, weights / GIB),
        Part("KV cache", "GiB", memory.kv_cache_gib, cached / GIB),
        Part("activations", "GiB", memory.activations_gib, served.prefill / GIB, judged=False),
        Part("FLOPs of a prefill", "TFLOP", (full.matmul + 2 * prompt / (prompt + 1) * full.attention) / ranks / TERA, prefill / TERA),
        Part("FLOPs of a decode step", "GFLOP", decode_flops(spec, prompt + 1).total / ranks / GIGA, decode / GIGA),
    )  # fmt: skip
    notes = [
        f"Counted: one of {ranks} tensor-parallel ranks, all {layers} layers; heads, feed-forward and vocabulary divided by {ranks}.",
        f"Weights are built in 16 bit; those of the layers are then taken at the planned {dep.precision}."
        if stored.bits < 16 else "Weights are built in 16 bit.",
        f"KV cache: bytes of a transformers DynamicCache per token at {dep.kv_cache_dtype}, times the planned tokens.",
        f"Activations: transformers' own modules over {serve.max_num_batched_tokens} tokens; {dep.engine} has fused ones, "
        "so this part is shown, not judged.",
        f"FLOPs: one sequence of {prompt} tokens and the token after it; attention as if it were full, on both sides.",
        "Not counted: graphs, collectives' buffers, CUDA context, what the engine keeps beside its model.",
    ]  # fmt: skip
    return DryRun(parts, (*notes, *_windows(spec, prompt)), {})


def _windows(spec: ModelSpec, tokens: int) -> list[str]:
    """A note when attention windows are shorter than what is counted."""
    windows = [m.window for layer, _ in spec.layer_groups for m in layer.mixers if isinstance(m, Attention)]
    short = any(w is not None and w < tokens for w in windows)
    return (
        ["Attention windows are shorter than the sequence: counted as full, predicted with the window."]
        if short
        else []
    )


def _shrink(stored: Precision) -> float:
    """Stored bytes of a layer's weight over 16 bit, scales included."""
    return stored.bytes_per_weight / 2 if stored.bits < 16 else 1.0

"""`planner validate --level dry`: what a plan predicts beside what its transformers model counts, without hardware.

One rank of the planned sharding runs on fake tensors: shapes and dtypes are real, nothing is stored, no weight is loaded.
Counted are tensors alone. From the planned total the CUDA context, communicators and fragmentation of training.yaml are
taken off before it is compared: tensors = (total - context - communicators) / (1 + fragmentation).
"""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass
from typing import Any

from planner.engines.training import framework
from planner.errors import InvalidValueError, NoPlanError
from planner.models.flops import decode_flops, matmul_flops_per_token, prefill_flops
from planner.models.precision import Precision, kv_dtype, precision
from planner.models.spec import Attention, ModelSpec
from planner.plan import Deployment, MemoryUse, Plan, TrainSettings
from planner.units import GIB
from planner.validate.dry_model import DTYPES, raw_config, spec_of, torch_modules

ENGINES = ("fsdp2", "deepspeed", "ddp")
STAGES = {"fsdp2": (0, 2, 3), "deepspeed": (2, 3), "ddp": (0,)}
OPTIMIZERS = ("adamw", "adamw-bf16")
KINK = (
    1.1  # a line whose peak is so near all states may miss that the peak moved to the end of backward: count all layers
)
GIGA, TERA = 1e9, 1e12


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

    def validation(self) -> dict[str, Any]:
        """The tree that goes into Plan.validation."""
        shown = [p for p in self.parts if p.judged]
        return {
            "level": "dry",
            "measured": {f"{p.name} ({p.unit})": round(p.counted, 4) for p in shown},
            "error_percent": {p.name: round(p.error_percent, 2) for p in shown if p.error_percent is not None},
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
    raw = raw_config(plan)
    _refuse(dep)
    collecting = gc.isenabled()
    gc.enable()  # the command line turns it off; cycles of dead tensors would count as alive
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch_modules()
            if dep.train is not None:
                return _training(raw, spec_of(plan), dep, dep.train, memory)
            return _serving(raw, spec_of(plan), plan, dep, memory)
    finally:
        if not collecting:
            gc.disable()


def _refuse(dep: Deployment) -> None:
    """InvalidValueError for what the dry run does not count yet."""
    train, why = dep.train, ""
    if dep.pipeline_parallel * dep.context_parallel * dep.expert_parallel > 1:
        why = "pipeline, context and expert parallelism are not counted"
    elif train is None:
        groups = dep.serve.attention_data_parallel if dep.serve else 1
        why = "attention groups are not counted" if groups > 1 else ""
    elif dep.engine not in ENGINES:
        why = f"{dep.engine} has its own model; counted are {', '.join(ENGINES)}"
    elif train.zero_stage not in STAGES[dep.engine]:
        why = f"ZeRO-{train.zero_stage} of {dep.engine} is not counted"
    elif dep.tensor_parallel > 1:
        why = "tensor parallelism in training is not counted"
    elif train.method != "full" or train.optimizer not in OPTIMIZERS or dep.precision not in DTYPES:
        why = f"counted is full training in bf16 or fp16 with {' or '.join(OPTIMIZERS)}"
    elif train.offload != "none" or train.chunked_loss or train.checkpoint_interval > 1:
        why = "offload, chunked loss and checkpoints over several layers are not counted"
    if why:
        raise InvalidValueError("the dry run cannot count this plan yet", why, "Take the estimate with its interval.")


def _training(raw: dict[str, Any], spec: ModelSpec, dep: Deployment, train: TrainSettings, memory: MemoryUse) -> DryRun:
    from planner.validate.dry_flops import training_flops
    from planner.validate.dry_train import Counted, Rank, count, layers_to_count, line

    engine = "ddp" if train.zero_stage == 0 else dep.engine
    rank = Rank(
        engine, dep.data_parallel, train.zero_stage, train.micro_batch_size, train.seq_len,
        train.checkpoint_interval > 0, dep.precision, train.optimizer == "adamw-bf16", train.gradient_accumulation_steps > 1,
    )  # fmt: skip
    layers = len(spec.layers)
    runs = layers_to_count(layers, rank)
    counted: Counted = line({n: count(raw, n, rank) for n in runs}, layers)
    if counted.peak < KINK * (counted.weights + counted.optimizer + counted.gradients):
        counted, runs = counted if layers in runs else count(raw, layers, rank), (layers,)
    flops = training_flops(
        raw, layers, batch=train.micro_batch_size, tokens=train.seq_len, checkpointing=rank.checkpointing
    )
    tensors = planned_tensors_gib(dep, memory)
    planned_rest = tensors - memory.weights_gib - memory.optimizer_gib
    parts = (
        Part("weights", "GiB", memory.weights_gib, counted.weights / GIB),
        Part("gradients after backward", "GiB", memory.gradients_gib, counted.gradients / GIB),
        Part("optimizer", "GiB", memory.optimizer_gib, counted.optimizer / GIB),
        Part("the rest of the peak", "GiB", planned_rest, counted.rest / GIB),
        Part("tensors at the peak", "GiB", tensors, counted.peak / GIB),
        Part("FLOPs of a micro-batch", "TFLOP", planned_step_flops(spec, train) / TERA, flops / TERA),
    )
    how = (
        f"all {layers} layers"
        if runs == (layers,)
        else f"{runs[0]} and {runs[1]} layers and a straight line to {layers}"
    )
    notes = [
        f"Counted: one of {dep.data_parallel} ranks, {how}, micro-batch {train.micro_batch_size} x {train.seq_len} tokens, "
        f"{'every layer' if rank.checkpointing else 'no'} checkpoint.",
        "The rest of the peak: activations, logits, gathered weights, buffers and the gradients alive at that moment.",
        "FLOPs: causal attention as if it were full, on both sides; recomputation ends early, at the last tensor it needs.",
        "Not counted: CUDA context, communicators, fragmentation, kernels' workspace, temporaries of the optimizer step.",
    ]
    notes += [_STAND_INS[engine]] if engine in _STAND_INS else []
    notes += _windows(spec, train.seq_len)
    return DryRun(parts, tuple(notes), {k: v / GIB for k, v in counted.parts.items()})


_STAND_INS = {
    "deepspeed": "DeepSpeed itself does not run on fake tensors: its partitions, gradients and buckets are stood in for; "
    "prefetched and persistent parameters of stage 3 are not in it.",
    "ddp": "DDP's buckets are taken as large as the gradients.",
}


def planned_tensors_gib(dep: Deployment, memory: MemoryUse) -> float:
    """(total - context - communicators) / (1 + fragmentation) of a training plan, constants from training.yaml."""
    n = framework(dep.engine).number
    fixed = n("context_gib") + (n("nccl_gib") if dep.gpus > 1 else 0.0)
    return (memory.total_gib - fixed) / (1 + n("fragmentation"))


def planned_step_flops(spec: ModelSpec, train: TrainSettings) -> float:
    """3 x forward of a micro-batch, and once more the layers when they are recomputed; attention without its mask."""
    tokens = train.seq_len
    attention = prefill_flops(spec, tokens).attention * 2 * tokens / (tokens + 1)
    forward = matmul_flops_per_token(spec) * tokens + attention
    again = matmul_flops_per_token(spec, head=False) * tokens + attention if train.checkpoint_interval else 0.0
    return float(train.micro_batch_size * (3 * forward + again))


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

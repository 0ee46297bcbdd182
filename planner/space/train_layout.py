"""Which training layouts are legal, and the reason when one is not: one list of rules, for one layout or millions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.engines.training import Framework
from planner.hardware.records import Gpu
from planner.models.spec import Attention, DenseMlp, LatentAttention, ModelSpec, MoeMlp
from planner.request import OFFLOADS, TrainJob
from planner.space.hardware_classes import HardwareClass
from planner.space.train_rows import BoolArray, TrainRows

SIXTEEN_BIT = ("bf16", "fp16")


def job_problem(model: ModelSpec, job: TrainJob, framework: Framework, gpu: Gpu) -> str | None:
    """Why this framework cannot do this job on this GPU at all; None when it can."""
    if not framework.runs_on(gpu):
        return f"{framework.label} does not run on {gpu.vendor} {'devices' if gpu.vendor == 'cpu' else 'GPUs'}"
    framework = framework.on(gpu)
    if job.method not in framework.methods:
        return f"{framework.label} has no {job.method} training"
    if job.precision not in framework.precisions:
        return f"{framework.label} does not train in {job.precision}"
    if job.optimizer not in framework.optimizers:
        return f"{framework.label} does not offer the optimizer {job.optimizer}"
    if job.precision == "bf16" and "bf16" not in gpu.peak_tflops:
        return f"{gpu.name} has no bf16 tensor cores; use fp16"
    if job.precision == "fp8" and "fp8" not in gpu.peak_tflops:
        return f"{gpu.name} has no fp8 tensor cores"
    if job.precision == "fp16" and "fp16" not in gpu.peak_tflops:
        return f"{gpu.name} has no fp16 tensor cores"
    if job.optimizer == "adamw-bf16" and job.precision != "bf16":
        return "adamw-bf16 keeps everything in bf16: train in bf16"
    if framework.models and model.hf_id.removesuffix("-Instruct") not in framework.models:
        return f"{framework.label} has no configuration for {model.hf_id or model.name}"
    only = framework.combinations.optimizer_methods.get(job.optimizer)
    if only is not None and job.method not in only:
        return f"{framework.label} runs {job.optimizer} with {', '.join(only)} training only"
    if framework.combinations.packed_only and not job.packing:
        return f"{framework.label} trains on packed sequences only"
    if job.seq_len > model.max_context:
        return f"sequences of {job.seq_len} tokens exceed the model's context of {model.max_context}"
    return None


@dataclass(frozen=True)
class _Problem:
    """What the rules see: facts of model, job, framework and hardware, beside the rows (all of one framework)."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    widths: tuple[int, ...]
    experts: int
    job: TrainJob
    model: ModelSpec
    framework: Framework
    hw: HardwareClass
    rows: TrainRows


Rule = tuple[Callable[[_Problem], BoolArray], Callable[[_Problem], str]]


def _first(p: _Problem, column: str) -> int:
    """The value of a column in the first row, for the words."""
    return int(getattr(p.rows, column)[0])


def _divides(columns: np.ndarray, numbers: tuple[int, ...]) -> BoolArray:
    ok = np.ones(len(columns), dtype=bool)
    for number in numbers:
        ok &= number % columns == 0
    return ok


def _kv_ok(columns: np.ndarray, numbers: tuple[int, ...]) -> BoolArray:
    """Key/value heads are cut evenly, or copied evenly when there are fewer than ranks."""
    ok = np.ones(len(columns), dtype=bool)
    for number in numbers:
        ok &= (number % columns == 0) | (columns % number == 0)
    return ok


def _axis(name: str, column: str) -> Rule:
    return (
        lambda p: np.asarray((getattr(p.rows, column) == 1) | (name in p.framework.axes)),
        lambda p: f"{p.framework.label} has no {name} parallelism",
    )


def _stages_ok(p: _Problem) -> BoolArray:
    r, f = p.rows, p.framework
    ok = np.isin(r.zero_stage, f.zero_stages)
    ok &= (r.pipeline_parallel == 1) | np.isin(r.zero_stage, f.zero_with_pipeline)
    return np.asarray(ok & ((r.tensor_parallel == 1) | np.isin(r.zero_stage, f.zero_with_tensor)))


def _stages_words(p: _Problem) -> str:
    r, f = p.rows, p.framework
    stage = int(r.zero_stage[0])
    if stage not in f.zero_stages:
        return f"{f.label} has no ZeRO stage {stage}; it has {', '.join(map(str, f.zero_stages))}"
    axis = "pipeline" if r.pipeline_parallel[0] > 1 and stage not in f.zero_with_pipeline else "tensor"
    return f"{f.label} refuses ZeRO-{stage} with {axis} parallelism"


def _offload_ok(p: _Problem) -> BoolArray:
    allowed = np.zeros((len(OFFLOADS), 4), dtype=bool)
    allowed[0] = True
    for kind, stages in p.framework.offloads.items():
        allowed[OFFLOADS.index(kind), list(stages)] = True
    return np.asarray(allowed[p.rows.offload, np.clip(p.rows.zero_stage, 0, 3)])


def _pair_ok(p: _Problem) -> BoolArray:
    both = (p.rows.tensor_parallel > 1) & (p.rows.pipeline_parallel > 1)
    return np.asarray(~both | p.framework.tensor_with_pipeline)


def _sequence_ok(p: _Problem) -> BoolArray:
    cut = p.rows.context_parallel * np.where(p.rows.context_parallel > 1, 2, 1)
    ways = cut * (p.rows.tensor_parallel if p.framework.sequence_parallel else 1)
    return np.asarray(p.job.seq_len % ways == 0)


def _expert_ok(p: _Problem) -> BoolArray:
    ep, ranks = p.rows.expert_parallel, p.rows.tensor_parallel * p.rows.context_parallel * p.rows.data_parallel
    if not p.experts:
        return np.asarray(ep == 1)
    return np.asarray((p.experts % ep == 0) & (ranks % ep == 0))


def _checkpoint_ok(p: _Problem) -> BoolArray:
    k, per_stage = p.rows.checkpoint_interval, -(-len(p.model.layers) // p.rows.pipeline_parallel)
    ok = (k >= 0) & (k <= per_stage)
    if p.framework.combinations.checkpoint_divides:
        ok &= (k <= 1) | (len(p.model.layers) % np.maximum(1, p.rows.pipeline_parallel * k) == 0)
    return np.asarray(ok & ((k <= 1) | p.framework.checkpoint_any_interval))


def _checkpoint_words(p: _Problem) -> str:
    k, most = _first(p, "checkpoint_interval"), -(-len(p.model.layers) // _first(p, "pipeline_parallel"))
    if k > most:
        return f"a checkpoint every {k} layers in stages of {most}"
    if p.framework.checkpoint_any_interval:
        return f"{p.framework.label} wants checkpoints every {k} layers to divide the layers of every stage"
    return f"{p.framework.label} checkpoints every layer or none, not every {k}"


def _combination_ok(p: _Problem) -> BoolArray:
    """The framework's own limits on what goes together (Combinations)."""
    c, r, job = p.framework.combinations, p.rows, p.job
    ok = np.ones(len(r), dtype=bool)
    if c.pipeline_methods is not None and job.method not in c.pipeline_methods:
        ok &= r.pipeline_parallel == 1
    if c.pipeline_optimizers is not None and job.optimizer not in c.pipeline_optimizers:
        ok &= r.pipeline_parallel == 1
    if c.pipeline_packed_only and not job.packing:
        ok &= r.pipeline_parallel == 1
    if not c.pipeline_offloads:
        ok &= (r.pipeline_parallel == 1) | (r.offload == 0)
    if c.tensor_methods is not None and job.method not in c.tensor_methods:
        ok &= r.tensor_parallel == 1
    if c.tensor_dense_only and p.model.is_moe:
        ok &= r.tensor_parallel == 1
    if c.offload_optimizers is not None and job.optimizer not in c.offload_optimizers:
        ok &= r.offload == 0
    if c.context_plain and (job.chunked_loss or not job.packing):
        ok &= r.context_parallel == 1
    ok &= r.zero_stage >= c.least_stage.get(job.optimizer, 0)
    return np.asarray(ok & (r.zero_stage <= c.most_stage.get(job.optimizer, 3)))


def _combination_words(p: _Problem) -> str:
    if p.framework.combinations.tensor_dense_only and p.model.is_moe and int(p.rows.tensor_parallel[0]) > 1:
        return f"{p.framework.label} does not cut experts over tensor-parallel ranks"
    return f"{p.framework.label} does not combine this with {p.job.method} training and {p.job.optimizer}"


RULES: tuple[Rule, ...] = (
    (
        lambda p: np.asarray(np.minimum.reduce(p.rows.columns()[1:6] + p.rows.columns()[7:9]) >= 1),
        lambda p: "every degree, the micro-batch and the accumulation are at least 1",
    ),
    _axis("tensor", "tensor_parallel"),
    _axis("pipeline", "pipeline_parallel"),
    _axis("context", "context_parallel"),
    _axis("data", "data_parallel"),
    _axis("expert", "expert_parallel"),
    (_combination_ok, _combination_words),
    (_pair_ok, lambda p: f"{p.framework.label} does not combine tensor and pipeline parallelism"),
    (_stages_ok, _stages_words),
    (
        lambda p: np.asarray(
            (p.rows.zero_stage == 0)
            | (p.rows.data_parallel * p.rows.context_parallel > 1)
            | (p.rows.offload > 0)
            | (0 not in p.framework.zero_stages)
        ),
        lambda p: "ZeRO has nothing to shard over one data-parallel rank",
    ),
    (
        _offload_ok,
        lambda p: (
            f"{p.framework.label} cannot offload {OFFLOADS[_first(p, 'offload')]} "
            f"at ZeRO stage {_first(p, 'zero_stage')}"
        ),
    ),
    (
        lambda p: np.asarray(p.rows.tensor_parallel <= p.hw.gpus_per_node),
        lambda p: f"tensor parallelism of {_first(p, 'tensor_parallel')} crosses machines of {p.hw.gpus_per_node} GPUs",
    ),
    (
        lambda p: _divides(p.rows.tensor_parallel, p.heads) & _kv_ok(p.rows.tensor_parallel, p.kv_heads),
        lambda p: (
            f"{_first(p, 'tensor_parallel')} tensor-parallel ranks do not divide the attention heads "
            f"({', '.join(map(str, p.heads + p.kv_heads))})"
        ),
    ),
    (
        lambda p: _divides(p.rows.tensor_parallel, p.widths),
        lambda p: (
            f"{_first(p, 'tensor_parallel')} tensor-parallel ranks do not divide the widths "
            f"({', '.join(map(str, p.widths))})"
        ),
    ),
    (
        lambda p: np.asarray(p.rows.pipeline_parallel <= len(p.model.layers)),
        lambda p: f"{_first(p, 'pipeline_parallel')} pipeline stages for {len(p.model.layers)} layers",
    ),
    (
        lambda p: np.asarray(
            p.framework.uneven_stages | (len(p.model.layers) % np.maximum(1, p.rows.pipeline_parallel) == 0)
        ),
        lambda p: (
            f"{p.framework.label} cuts pipelines evenly: {len(p.model.layers)} layers "
            f"over {_first(p, 'pipeline_parallel')} stages"
        ),
    ),
    (
        lambda p: np.asarray(
            (p.rows.pipeline_parallel == 1) | (p.rows.gradient_accumulation_steps >= p.rows.pipeline_parallel)
        ),
        lambda p: (
            f"fewer micro-batches ({_first(p, 'gradient_accumulation_steps')}) "
            f"than pipeline stages ({_first(p, 'pipeline_parallel')})"
        ),
    ),
    (_sequence_ok, lambda p: f"sequences of {p.job.seq_len} tokens are not divisible by the ranks that cut them"),
    (
        _expert_ok,
        lambda p: (
            f"{_first(p, 'expert_parallel')} expert-parallel ranks do not divide {p.experts} experts and the ranks"
            if p.experts
            else "the model has no experts"
        ),
    ),
    (
        _checkpoint_ok,
        _checkpoint_words,
    ),
    (
        lambda p: np.asarray(
            (p.job.method != "qlora") | (p.rows.zero_stage < 3) | (p.framework.number("quantised_sharded") > 0)
        ),
        lambda p: f"{p.framework.label}: ZeRO-3 does not shard 4-bit weights; take fsdp2 or a lower stage",
    ),
    (
        lambda p: np.asarray((p.hw.fabric is not None) | (p.rows.world <= p.hw.gpus_per_node)),
        lambda p: f"{_first(p, 'world')} GPUs span machines of {p.hw.gpus_per_node} that no known network joins",
    ),
)


def _problem(model: ModelSpec, job: TrainJob, framework: Framework, hw: HardwareClass, rows: TrainRows) -> _Problem:
    heads, kv, widths = set(), set(), {model.hidden}
    for layer, _ in model.layer_groups:
        for mixer in layer.mixers:
            if isinstance(mixer, Attention):
                heads.add(mixer.heads)
                kv.add(mixer.kv_heads)
            elif isinstance(mixer, LatentAttention) or mixer.heads:
                heads.add(int(mixer.heads or 1))
        if isinstance(layer.mlp, DenseMlp):
            widths.add(layer.mlp.intermediate)
        elif isinstance(layer.mlp, MoeMlp):
            widths |= {layer.mlp.expert_intermediate} | ({layer.mlp.shared_intermediate} - {0})
    experts = next((layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, MoeMlp)), 0)
    here = framework.on(hw.gpu)
    return _Problem(tuple(sorted(heads)), tuple(sorted(kv)), tuple(sorted(widths)), experts, job, model, here, hw, rows)


def layout_problem(
    model: ModelSpec, job: TrainJob, framework: Framework, hw: HardwareClass, row: Sequence[int]
) -> str | None:
    """Why one layout is not legal, in words; None when it is. row: the fields of TrainRows in order."""
    problem = job_problem(model, job, framework, hw.gpu)
    if problem:
        return problem
    asked = _problem(model, job, framework, hw, TrainRows.of([row]))
    for test, words in RULES:
        if not bool(test(asked)[0]):
            return words(asked)
    return None


def legal(
    model: ModelSpec, job: TrainJob, hw: HardwareClass, frameworks: Sequence[Framework], rows: TrainRows
) -> BoolArray:
    """True for each row that layout_problem finds no fault with."""
    result = np.zeros(len(rows), dtype=bool)
    for number, framework in enumerate(frameworks):
        mask = rows.framework == number
        if not mask.any() or job_problem(model, job, framework, hw.gpu):
            continue
        asked = _problem(model, job, framework, hw, rows.take(mask))
        ok = RULES[0][0](asked)
        for test, _ in RULES[1:]:
            with np.errstate(divide="ignore"):
                ok = ok & test(asked)
        result[mask] = ok
    return result

"""What a serving request lets the solver choose among, and the checks that need no hardware."""

from __future__ import annotations

import numpy as np

from planner.engines.formats import checkpoint_for
from planner.engines.records import EngineSpec, engine, engine_on_cpu, engines
from planner.errors import InvalidValueError
from planner.estimator.operating_point import Settings, total_load
from planner.models.precision import KvDtype, Precision, kv_dtype, kv_dtypes, precision, precisions
from planner.models.spec import ModelSpec
from planner.request import Pins, ServeRequest

WORTH_CONVERTING = 0.75
SEARCHED_KV = ("bf16", "fp16", "fp8")


def accuracy_loss(model: ModelSpec, weights: Precision, kv: KvDtype) -> float:
    """Expected loss in percent against the checkpoint as published (a natively quantised model starts at 0)."""
    native = precision(model.native_precision).accuracy_loss_percent
    return max(0.0, weights.accuracy_loss_percent - native) + kv.accuracy_loss_percent


def searched_precisions(model: ModelSpec, pinned: str | None) -> tuple[Precision, ...]:
    """The precisions to search: the published one, and every method that can be applied to it and saves a quarter of its bits.

    fp16 is searched only as the 16-bit fallback of bf16 models on GPUs without bf16 (the engine table decides), or
    when it is pinned.
    """
    if pinned is not None:
        return (precision(pinned),)
    native = precision(model.native_precision)
    smaller = WORTH_CONVERTING * (native.bits + native.overhead_bits)
    found = [
        p
        for p in precisions()
        if p.name == native.name or (p.bits + p.overhead_bits <= smaller and not p.native_only and p.servable)
    ]
    if native.name == "bf16":
        found.append(precision("fp16"))
    return tuple(found)


def searched_kv_dtypes(pinned: str | None) -> tuple[KvDtype, ...]:
    """16 bit and fp8 (e4m3) unless one is pinned."""
    return (kv_dtype(pinned),) if pinned is not None else tuple(k for k in kv_dtypes() if k.name in SEARCHED_KV)


def searched_engines(pinned: str | None) -> tuple[EngineSpec, ...]:
    """All engines unless one is pinned, and those that also run on CPU devices once more as they run there."""
    found = (engine(pinned),) if pinned is not None else tuple(engines().values())
    return found + tuple(on_cpu for e in found if (on_cpu := engine_on_cpu(e.name)) is not None)


def serving_settings(model: ModelSpec, request: ServeRequest) -> Settings:
    """Context and batching of the engine.

    max_model_len: the pin, else room for requests twice as long as the mean, at least 4096, never above the model's.
    """
    w = request.workload
    tokens = w.input_tokens + w.output_tokens
    if tokens > model.max_context:
        raise InvalidValueError(
            f"{w.input_tokens} input + {w.output_tokens} output tokens do not fit the {model.max_context} tokens of context of {model.name}",
            "",
            "Lower --input-tokens or --output-tokens, or choose a model with a longer context.",
        )
    wanted = request.pins.max_model_len
    if wanted is None:
        wanted = min(model.max_context, max(4096, 2 ** int(np.ceil(np.log2(2 * tokens)))))
    elif wanted > model.max_context:
        raise InvalidValueError(
            f"--max-model-len {wanted} is above the {model.max_context} tokens of context of {model.name}",
            "",
            "Lower it.",
        )
    elif wanted < tokens:
        raise InvalidValueError(
            f"--max-model-len {wanted} is below input + output tokens ({tokens})",
            "",
            "Raise it or shorten the workload.",
        )
    return Settings(
        wanted, max_num_batched_tokens=8192, tokens_per_sequence=tokens, max_num_seqs=request.pins.max_num_seqs
    )


def check_pins(model: ModelSpec, request: ServeRequest) -> None:
    """Pinned degrees that the model itself forbids are bad input, with the reason."""
    check_modes(model, request.pins)
    from planner.models.limits import fewest_kv_heads, pipeline_parallel_problem, tensor_parallel_problem
    from planner.space.layouts import kv_heads_problem

    pins = request.pins
    for flag, value, rule in (
        ("--tensor-parallel", pins.tensor_parallel, tensor_parallel_problem),
        ("--pipeline-parallel", pins.pipeline_parallel, pipeline_parallel_problem),
    ):
        if value is None:
            continue
        if value < 1:
            raise InvalidValueError(f"{flag} must be 1 or more, not {value}", "", f"Write for example {flag} 2.")
        reason = rule(model, value)
        if reason is not None:
            raise InvalidValueError(
                f"{flag} {value} does not work for {model.name}",
                reason,
                "Choose another degree or leave it to the solver.",
            )
    if pins.engine is not None and pins.tensor_parallel is not None:
        reason = kv_heads_problem(engine(pins.engine), pins.tensor_parallel, fewest_kv_heads(model))
        if reason is not None:
            raise InvalidValueError(
                f"--tensor-parallel {pins.tensor_parallel} does not work for {model.name} with {pins.engine}",
                reason,
                f"Choose at most {fewest_kv_heads(model)}, or another engine.",
            )


def check_modes(model: ModelSpec, pins: Pins) -> None:
    """Pinned expert parallelism and attention groups that no layout can have are bad input."""
    from planner.models.limits import expert_parallel_problem

    for flag, value in (("--expert-parallel", pins.expert_parallel), ("--attention-dp", pins.attention_data_parallel)):
        if value is None or value == 1:
            continue
        reason = expert_parallel_problem(model, value) if model.is_moe else "the model has no experts"
        if reason is None and pins.tensor_parallel not in (None, value):
            reason = f"it is 1 or the tensor-parallel degree, {pins.tensor_parallel}"
        if reason is not None:
            raise InvalidValueError(
                f"{flag} {value} does not work for {model.name}",
                reason,
                "Choose another degree or leave it to the solver.",
            )


def check_precisions(model: ModelSpec, request: ServeRequest) -> None:
    """A pinned precision that no engine in question runs, or a model of which none runs any, is bad input."""
    pins = request.pins
    known = {row.precision for e in searched_engines(pins.engine) for row in e.precisions}
    wanted = [p.name for p in searched_precisions(model, pins.precision)]
    if not known.intersection(wanted):
        who = pins.engine or "no engine here"
        raise InvalidValueError(
            f"{who} {'does not run' if pins.engine else 'runs'} {wanted[0]} weights",
            f"that is how {model.name} is published" if pins.precision is None else "",
            f"It runs {', '.join(sorted(known))}." if pins.engine else f"Known: {', '.join(sorted(known))}.",
        )


def obtainable(model: ModelSpec, pins: Pins, engine: EngineSpec, weights: Precision, needs_checkpoint: bool) -> bool:
    """Can the weights be had in this precision, in a format the engine loads?

    As published; made by the engine while it loads 16-bit weights; or as another published checkpoint of the model. A
    pinned precision and --unpublished leave finding or making the checkpoint to the user.
    """
    if weights.name == model.native_precision:
        return True
    if not needs_checkpoint:
        return model.native_precision in ("bf16", "fp16", "fp32")
    if pins.precision is not None or pins.unpublished_checkpoints:
        return True
    return checkpoint_for(engine.name, model.hf_id, weights.name) is not None


def made_while_loading(model: ModelSpec, engine: EngineSpec, weights: Precision, needs_checkpoint: bool) -> bool:
    """True when the engine converts 16-bit weights: nobody published this precision in a format it loads."""
    if needs_checkpoint or weights.name == model.native_precision:
        return False
    return checkpoint_for(engine.name, model.hf_id, weights.name) is None


def mode_wanted(mode: tuple[int, int], pins: Pins) -> bool:
    """True when a mode agrees with the pinned expert parallelism and attention groups."""
    expert, attention = mode
    return pins.expert_parallel in (None, expert) and pins.attention_data_parallel in (None, attention)


def expert_modes(model: ModelSpec, tp: int) -> list[tuple[int, int]]:
    """How a tensor-parallel group may be shared out: (expert_parallel, attention_data_parallel).

    Dense models have one way. Experts may be dealt out whole (expert parallel over the group); then attention may also
    run on every rank with its own sequences, so that a latent or narrow KV cache is not copied to all of them.
    """
    from planner.models.limits import expert_parallel_problem

    if tp == 1 or not model.is_moe or expert_parallel_problem(model, tp) is not None:
        return [(1, 1)]
    return [(1, 1), (tp, 1), (tp, tp)]


def describe_load(request: ServeRequest) -> str:
    """The load in words."""
    w = request.workload
    if w.concurrency is not None:
        return f"{w.concurrency} users, each with one request in flight"
    return f"{total_load(w):g} requests/s"

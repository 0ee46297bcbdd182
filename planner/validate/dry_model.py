"""The transformers model of a plan, shaped from its config alone: no weights, no network, no GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planner.errors import InvalidValueError, MissingExtraError, ModelConfigError
from planner.models.load import load_model, parse_json
from planner.models.lookup import find
from planner.models.spec import ModelSpec
from planner.plan import Plan

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_UNUSED = ("architectures", "torch_dtype", "dtype", "quantization_config", "rope_scaling", "rope_theta", "model_type")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def torch_modules() -> tuple[Any, Any]:
    """(torch, transformers). Raises MissingExtraError when one is not installed."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingExtraError(error.name or "torch", "profile", "a dry run") from None
    return torch, transformers


def raw_config(plan: Plan) -> dict[str, Any]:
    """config.json of the plan's model as a dict: the registry's record, or the local file the request named.

    Raises ModelConfigError when neither has it, InvalidValueError for an architecture the dry run does not count.
    """
    ref = str(plan.request.get("model") or "")
    found = find(plan.model.hf_id) or find(ref)
    if found is not None:
        config = dict(found[0]["config"])
    else:
        path = Path(ref).expanduser()
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ModelConfigError(
                f"the dry run has no config.json of {plan.model.name}",
                "it is not in the registry and the request names no local file",
                "Solve with --model path/to/config.json.",
            )
        config = parse_json(path.read_bytes(), str(path))
    if not isinstance(config, dict) or config.get("model_type") not in MODEL_TYPES:
        kind = config.get("model_type") if isinstance(config, dict) else None
        raise InvalidValueError(
            f"the dry run does not count models of type {kind!r} yet",
            f"it knows {', '.join(MODEL_TYPES)}",
            "Take the estimate with its interval.",
        )
    return config


def spec_of(plan: Plan) -> ModelSpec:
    """The model as planner counts it. Raises what load_model raises."""
    return load_model(str(plan.request.get("model") or plan.model.hf_id), offline=True)


def build_config(raw: dict[str, Any], layers: int, ranks: int = 1) -> Any:
    """transformers config with `layers` decoder layers, of one of `ranks` tensor-parallel ranks.

    A rank has heads / ranks, max(1, kv_heads / ranks), feed-forward / ranks and vocabulary / ranks, and the full hidden
    width. Rotary scaling is left out: it changes values, not shapes. Raises ModelConfigError.
    """
    _, transformers = torch_modules()
    fields = {k: v for k, v in raw.items() if k not in _UNUSED}
    heads, hidden = int(fields["num_attention_heads"]), int(fields["hidden_size"])
    kv = int(fields.get("num_key_value_heads") or heads)
    if heads % ranks or fields["intermediate_size"] % ranks or fields["vocab_size"] % ranks:
        raise InvalidValueError(
            f"{heads} heads, feed-forward or vocabulary do not divide by {ranks} ranks",
            "",
            "Take the estimate with its interval.",
        )
    fields |= {
        "num_hidden_layers": layers,
        "head_dim": int(fields.get("head_dim") or hidden // heads),
        "num_attention_heads": heads // ranks,
        "num_key_value_heads": max(1, kv // ranks),
        "intermediate_size": fields["intermediate_size"] // ranks,
        "vocab_size": fields["vocab_size"] // ranks,
        "use_cache": False,
        "pad_token_id": None,
    }
    fields.pop("layer_types", None)
    try:
        config = transformers.AutoConfig.for_model(raw["model_type"], **fields)
    except (TypeError, ValueError, KeyError) as error:
        raise ModelConfigError("transformers does not accept the model's config", str(error)[:120], "") from None
    config._attn_implementation = "sdpa"
    return config


@contextmanager
def plain_masks(model: Any) -> Iterator[None]:
    """No mask tensor while inside: transformers' mask builder looks at data, which fake tensors do not have.

    Without one, scaled_dot_product_attention runs causal, as it does for an unpadded batch.
    """
    home = next(c.__module__ for c in type(model).__mro__ if c.__module__.startswith("transformers.models."))
    module = sys.modules[home]
    names = [n for n in ("create_causal_mask", "create_sliding_window_causal_mask") if hasattr(module, n)]
    kept = {n: getattr(module, n) for n in names}
    try:
        for name in names:
            setattr(module, name, lambda *_a, **_k: None)
        yield
    finally:
        for name, function in kept.items():
            setattr(module, name, function)


def build(config: Any, dtype: Any) -> Any:
    """The causal language model of a config in a dtype, on the current device or mode."""
    torch, transformers = torch_modules()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return transformers.AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)


def recompute(model: Any) -> None:
    """Checkpoint every decoder layer, non-reentrant (activation_checkpointing_* since transformers 5.24)."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)

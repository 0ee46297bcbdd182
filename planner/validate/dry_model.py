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

EXPERT_TYPES = ("mixtral", "qwen3_moe")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", *EXPERT_TYPES)
_WIDTHS = ("intermediate_size", "moe_intermediate_size")
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


def build_config(raw: dict[str, Any], layers: int, ranks: int = 1, vocab_ranks: int = 0) -> Any:
    """transformers config with `layers` decoder layers, of one of `ranks` tensor-parallel ranks.

    A rank has heads / ranks, max(1, kv_heads / ranks), feed-forward / ranks and vocabulary / vocab_ranks (0: as ranks), and
    the full hidden width. Rotary scaling is left out: it changes values, not shapes. Raises ModelConfigError.
    """
    _, transformers = torch_modules()
    fields = {k: v for k, v in raw.items() if k not in _UNUSED}
    heads, hidden = int(fields["num_attention_heads"]), int(fields["hidden_size"])
    kv, vocab = int(fields.get("num_key_value_heads") or heads), vocab_ranks or ranks
    widths = [int(fields[w]) for w in _WIDTHS if fields.get(w)]
    if heads % ranks or any(w % ranks for w in widths):
        raise InvalidValueError(
            f"{heads} heads or feed-forward do not divide by {ranks} ranks",
            "",
            "Take the estimate with its interval.",
        )
    fields |= {
        "num_hidden_layers": layers,
        "head_dim": int(fields.get("head_dim") or hidden // heads),
        "num_attention_heads": heads // ranks,
        "num_key_value_heads": max(1, kv // ranks),
        **{w: int(fields[w]) // ranks for w in _WIDTHS if fields.get(w)},
        "vocab_size": -(-int(fields["vocab_size"]) // vocab),
        "use_cache": False,
        "pad_token_id": None,
    }
    for name in ("layer_types", "max_window_layers"):
        fields.pop(name, None)
    try:
        config = transformers.AutoConfig.for_model(raw["model_type"], **fields)
    except (TypeError, ValueError, KeyError) as error:
        raise ModelConfigError("transformers does not accept the model's config", str(error)[:120], "") from None
    config._attn_implementation = "sdpa"
    return config


@contextmanager
def plain_masks(model: Any) -> Iterator[None]:
    """No mask tensor and no kernel of grouped experts while inside.

    transformers' mask builder looks at data, which fake tensors do not have: without a mask, scaled_dot_product_attention runs
    causal, as it does for an unpadded batch. Its experts then take the operator that has shapes for every dtype.
    """
    home = next(
        c.__module__ for c in base_model(model).__class__.__mro__ if c.__module__.startswith("transformers.models.")
    )
    module, changed = sys.modules[home], []
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        if hasattr(module, name):
            changed.append((module, name, getattr(module, name)))
            setattr(module, name, lambda *_a, **_k: None)
    from transformers.integrations import moe

    changed.append((moe, "_can_use_grouped_mm", moe._can_use_grouped_mm))
    moe._can_use_grouped_mm = lambda *_a, **_k: False
    try:
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


def base_model(model: Any) -> Any:
    """The transformers model under adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def build(config: Any, dtype: Any) -> Any:
    """The causal language model of a config in a dtype, on the current device or mode."""
    torch, transformers = torch_modules()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return transformers.AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)


def build_adapted(config: Any, dtype: Any, lora: Any) -> Any:
    """The model with LoRA adapters, as the launch files ask of peft. lora: rank, targets, fp32 (dtype of the adapters).

    peft moves its adapters, which fake tensors refuse: it works on the meta device, then every tensor is made anew.
    """
    torch, _ = torch_modules()
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingExtraError(error.name or "peft", "profile", "a dry run of LoRA") from None
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    options = LoraConfig(r=lora.rank, target_modules=list(lora.targets), task_type="CAUSAL_LM")
    before = torch.get_default_dtype()
    with unset_fake_temporarily(), torch.device("meta"):
        base = build(config, dtype)
        torch.set_default_dtype(
            torch.float32 if lora.fp32 else dtype
        )  # on the meta device peft does not follow the base
        try:
            model = get_peft_model(base, options, autocast_adapter_dtype=lora.fp32)
        finally:
            torch.set_default_dtype(before)
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, old in (*module._parameters.items(), *module._buffers.items()):
            if old is None:
                continue
            if id(old) not in made:
                new = torch.empty(old.shape, dtype=old.dtype)
                made[id(old)] = torch.nn.Parameter(new, old.requires_grad) if name in module._parameters else new
            (module._parameters if name in module._parameters else module._buffers)[name] = made[id(old)]
    return model


def recompute(model: Any, every: int) -> None:
    """A non-reentrant checkpoint every `every` decoder layers, as the launch files make them.

    One layer: transformers' own (activation_checkpointing_* since transformers 5.24); more: groups of layers in one.
    """
    if every > 1:
        grouped = _groups(base_model(model).model.layers, every)
        base_model(model).model.layers = grouped
        return
    options, inner = {"use_reentrant": False}, base_model(model)
    if hasattr(inner, "activation_checkpointing_enable"):
        inner.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _groups(layers: Any, every: int) -> Any:
    """The same modules; iterating over them gives one checkpointed call for each group."""
    torch, _ = torch_modules()
    from torch.utils.checkpoint import checkpoint

    def call(group: list[Any]) -> Any:
        def run(hidden: Any, **kwargs: Any) -> Any:
            for layer in group:
                hidden = layer(hidden, **kwargs)
            return hidden

        return lambda hidden, **kwargs: checkpoint(run, hidden, use_reentrant=False, **kwargs)

    class Groups(torch.nn.ModuleList):  # type: ignore[misc, name-defined]
        """Layers that run in groups, each under one checkpoint."""

        def __iter__(self) -> Iterator[Any]:
            modules = list(super().__iter__())
            for first in range(0, len(modules), every):
                yield call(modules[first : first + every])

        def __getitem__(self, index: Any) -> Any:
            return self if isinstance(index, slice) else super().__getitem__(index)

    return Groups(list(layers))


def chunk_loss(model: Any, chunk: int) -> None:
    """Cross entropy over `chunk` tokens at a time, each part recomputed in backward: whole logits never exist."""
    torch, _ = torch_modules()
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_outputs import CausalLMOutput

    def part(hidden: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(model.lm_head(hidden).float(), labels, reduction="sum")

    def forward(input_ids: Any, labels: Any, **kwargs: Any) -> Any:
        hidden = model.model(input_ids=input_ids, **kwargs).last_hidden_state[:, :-1].flatten(0, 1)
        pairs = zip(hidden.split(chunk), labels[:, 1:].flatten().split(chunk), strict=True)
        return CausalLMOutput(loss=sum(checkpoint(part, h, t, use_reentrant=False) for h, t in pairs) / labels.numel())

    model.forward = forward

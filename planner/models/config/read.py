"""config.json to ModelSpec: the order of reading. Field by field; architecture names only pick traits (traits.json)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.errors import ModelConfigError
from planner.models.config.fields import MAX_CONTEXT, MAX_LAYERS, Fields
from planner.models.config.mixers import layer_kinds, mixers_of
from planner.models.config.mlps import mlps_of
from planner.models.config.quantised import quantisation_of
from planner.models.config.towers import towers_of
from planner.models.config.traits import Traits, traits_of
from planner.models.spec import Layer, ModelSpec

_TEXT = ("text_config", "language_config", "llm_config", "thinker_config", "language_model_config")
MAX_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length", "n_ctx")


def text_fields(raw: Mapping[str, Any]) -> Fields:
    """The language part of a config: the nested text config of a multimodal model with what the top level adds, else all of it."""
    top = Fields(raw)
    for name in _TEXT:
        inner = top.level(name)
        if inner is not None:
            deeper = next((n for n in _TEXT if isinstance(inner.raw.get(n), Mapping)), None)
            nested = inner.raw[deeper] if deeper else inner.raw
            shared = {k: raw[k] for k in ("tie_word_embeddings", "quantization_config", "torch_dtype", "dtype", "vocab_size") if k in raw}
            return Fields({**shared, **nested})
    return top


def norm_size(traits: Traits, hidden: int) -> int:
    """Parameters of one norm over the hidden width."""
    return {"rms": hidden, "layer": 2 * hidden, "layer_nobias": hidden, "none": 0}[traits.norm]


def _layers(f: Fields, traits: Traits, hidden: int) -> tuple[Layer, ...]:
    count = f.optional("num_hidden_layers", "n_layer", "n_layers", "num_layers", high=MAX_LAYERS)
    if count is None:
        listed = f.items("layers_block_type", "layer_types", "block_configs") or list(f.text("hybrid_override_pattern"))
        if not listed:
            raise ModelConfigError("config has no field 'num_hidden_layers'", "the size cannot be known without it", "Check the file.")
        count = min(len(listed), MAX_LAYERS)
    kinds = layer_kinds(f, traits, count)
    norms = traits.norms * norm_size(traits, hidden)
    if f.has("hybrid_override_pattern", "layers_block_type") and f.text("model_type") == "nemotron_h":
        from planner.models.config.special import nemotron_layers

        return nemotron_layers(f, traits, kinds, norms)
    mlps = mlps_of(f, traits, hidden, count) if f.text("model_type") not in ("mamba", "mamba2", "falcon_mamba") else [None] * count
    made: dict[tuple[str, int], Layer] = {}
    result = []
    for i, (kind, mlp) in enumerate(zip(kinds, mlps, strict=True)):
        key = (kind, id(mlp))
        if key not in made:
            made[key] = Layer(mixers_of(f, traits, kind, i), mlp, norms)
        result.append(made[key])
    return tuple(result)


def read_config(raw: Mapping[str, Any], name: str, *, hf_id: str = "", source: str = "", quant_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """The model that a config.json describes.

    quant_config: content of hf_quant_config.json when there is one. Raises ModelConfigError in one line for whatever is
    missing or makes no sense; what had to be assumed stands in ModelSpec.assumptions.
    """
    f = text_fields(raw)
    family = f.text("model_type") or Fields(raw).text("model_type")
    if not family:
        raise ModelConfigError("config has no field 'model_type'", "the block style cannot be known without it", "Check the file.")
    traits, assumptions = traits_of(family), []
    if not traits.known:
        assumptions.append(f"model type {family!r} is not known here: blocks are counted as Llama's (RMS norm, gated, no biases); expect a few percent")
    hidden = f.count("hidden_size", "n_embd", "d_model", "dim")
    vocab = f.count("vocab_size", "padded_vocab_size")
    context = f.optional(*MAX_POSITIONS, high=MAX_CONTEXT)
    if context is None:
        context = 2048
        assumptions.append("config states no context length: 2048 is assumed")
    layers = _layers(f, traits, hidden)
    extra = traits.embedding_norms * norm_size(traits, hidden)
    if traits.positions is not None:
        extra += (context + traits.positions) * hidden
    head_bias = f.flag(traits.head_bias) if isinstance(traits.head_bias, str) else traits.head_bias
    towers, tower_notes = towers_of(Fields(raw), f, layers, hidden)
    precision, unquantised, notes = quantisation_of(f, Fields(raw), quant_config, layers)
    return ModelSpec(
        name=name, family=family, hidden=hidden, vocab=vocab, max_context=context, layers=layers,
        tie_embeddings=f.flag("tie_word_embeddings", default=traits.tied), final_norm_params=norm_size(traits, hidden) * traits.final_norm,
        embedding_extra_params=extra, lm_head_bias=head_bias, towers=towers, native_precision=precision,
        hf_id=hf_id, source=source, assumptions=tuple(assumptions + tower_notes + notes), unquantised_modules=unquantised,
        attributes=_attributes(f, context, layers),
    )  # fmt: skip


def _attributes(f: Fields, context: int, layers: tuple[Layer, ...]) -> dict[str, str]:
    from planner.models.config.rope import rope_elements

    return {"rope_elements": str(rope_elements(f, context, layers))}

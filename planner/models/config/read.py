"""config.json to ModelSpec: the order of reading. Field by field; architecture names only pick traits (traits.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.errors import ModelConfigError
from planner.models.config.encdec import is_encoder_decoder, read_encoder_decoder
from planner.models.config.fields import MAX_CONTEXT, MAX_LAYERS, Fields
from planner.models.config.generic import corrected, count_modules
from planner.models.config.mixers import layer_kinds, mixers_of
from planner.models.config.mlps import mlps_of
from planner.models.config.quantised import quantisation_of
from planner.models.config.rope import rope_elements
from planner.models.config.special import extra_norms, model_extra, nas_layers, nemotron_layers, v4_layers
from planner.models.config.towers import towers_of
from planner.models.config.traits import Traits, traits_of
from planner.models.spec import Layer, ModelSpec

_CHECK = "Check the file; a config.json of the Hugging Face hub is expected."
_NOT_GENERATORS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForImageClassification",
    "BertModel",
)
_TEXT = ("text_config", "language_config", "llm_config", "thinker_config", "language_model_config")
MAX_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "n_ctx",
)


def text_fields(raw: Mapping[str, Any]) -> Fields:
    """The language part of a config: the nested text config with what the top level adds, else all of it."""
    top = Fields(raw)
    for name in _TEXT:
        inner = top.level(name)
        if inner is not None:
            deeper = next((n for n in _TEXT if isinstance(inner.raw.get(n), Mapping)), None)
            nested = inner.raw[deeper] if deeper else inner.raw
            shared = {
                k: raw[k]
                for k in ("tie_word_embeddings", "quantization_config", "torch_dtype", "dtype", "vocab_size")
                if k in raw
            }
            tied = {"tie_word_embeddings": raw["tie_word_embeddings"]} if top.has("tie_word_embeddings") else {}
            return Fields({**shared, **nested, **tied})
    return top


def norm_size(traits: Traits, hidden: int) -> int:
    """Parameters of one norm over the hidden width."""
    return {"rms": hidden, "layer": 2 * hidden, "layer_nobias": hidden, "none": 0}[traits.norm]


def _layers(f: Fields, traits: Traits, hidden: int) -> tuple[Layer, ...]:
    count = f.optional("num_hidden_layers", "n_layer", "n_layers", "num_layers", high=MAX_LAYERS)
    if count is None:
        listed = f.items("layers_block_type", "layer_types", "block_configs") or list(f.text("hybrid_override_pattern"))
        if not listed:
            raise ModelConfigError(
                "config has no field 'num_hidden_layers'", "the size cannot be known without it", "Check the file."
            )
        count = min(len(listed), MAX_LAYERS)
    norms = traits.norms * norm_size(traits, hidden)
    if f.has("compress_ratios", "compress_rates"):
        return v4_layers(f, count, norms)
    if f.has("block_configs"):
        return nas_layers(f, count, hidden)
    kinds = layer_kinds(f, traits, count)
    if f.has("hybrid_override_pattern", "layers_block_type") and f.text("model_type") == "nemotron_h":
        return nemotron_layers(f, traits, kinds, norms)
    mlps = (
        mlps_of(f, traits, hidden, count)
        if f.text("model_type") not in ("mamba", "mamba2", "falcon_mamba")
        else [None] * count
    )
    made: dict[tuple[str, int], Layer] = {}
    result = []
    for i, (kind, mlp) in enumerate(zip(kinds, mlps, strict=True)):
        mixers = (
            mixers_of(f, traits, kind, i)
            if not made
            or f.has("indexer_types", "num_kv_shared_layers", "per_layer_config")
            or (kind, id(mlp)) not in made
            else None
        )
        key = (kind, id(mlp))
        if mixers is not None and (key not in made or made[key].mixers != mixers):
            made[key] = Layer(mixers, mlp, norms + extra_norms(f, traits, mlp, hidden))
        result.append(made[key])
    return tuple(result)


def read_config(
    raw: Mapping[str, Any],
    name: str,
    *,
    hf_id: str = "",
    source: str = "",
    quant_config: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """The model that a config.json describes.

    quant_config: content of hf_quant_config.json when there is one. Raises ModelConfigError in one line for whatever is
    missing or makes no sense; what had to be assumed stands in ModelSpec.assumptions.
    """
    top, f = Fields(raw), text_fields(raw)
    family = f.text("model_type") or top.text("model_type")
    if not family:
        raise ModelConfigError("config has no field 'model_type'", "the block style cannot be known without it", _CHECK)
    _refuse_encoders(top)
    if is_encoder_decoder(family):
        spec = _read_encoder_decoder(f, top, family, quant_config)
    else:
        spec = _read_decoder(f, top, family, quant_config)
    return replace(spec, name=name, hf_id=hf_id, source=source)


def _refuse_encoders(top: Fields) -> None:
    """Models that do not generate text are no deployment this program plans."""
    names = [n for n in top.items("architectures") or [] if isinstance(n, str)]
    if names and all(n.endswith(_NOT_GENERATORS) for n in names):
        raise ModelConfigError(
            f"{names[0][:60]} does not generate text", "only text generators are planned for", _CHECK
        )


def _read_decoder(f: Fields, top: Fields, family: str, quant_config: Mapping[str, Any] | None) -> ModelSpec:
    traits, assumptions = traits_of(family), []
    hidden = f.count("hidden_size", "n_embd", "d_model", "dim")
    vocab = f.count("vocab_size", "padded_vocab_size")
    context = f.optional(*MAX_POSITIONS, high=MAX_CONTEXT)
    if context is None:
        context = 2048
        assumptions.append("config states no context length: 2048 is assumed")
    layers = _layers(f, traits, hidden)
    extra = traits.embedding_norms * norm_size(traits, hidden) + model_extra(f, hidden, len(layers))
    if traits.positions is not None:
        extra += (context + traits.positions) * hidden
    head_bias = f.flag(traits.head_bias) if isinstance(traits.head_bias, str) else traits.head_bias
    towers, tower_notes = towers_of(top, f, layers, hidden)
    precision, unquantised, notes = quantisation_of(f, top, quant_config, layers)
    spec = ModelSpec(
        name="",
        family=family,
        hidden=hidden,
        vocab=vocab,
        max_context=context,
        layers=layers,
        tie_embeddings=f.flag("tie_word_embeddings", default=traits.tied),
        final_norm_params=norm_size(traits, hidden) * traits.final_norm,
        embedding_extra_params=extra,
        lm_head_bias=head_bias,
        towers=towers,
        native_precision=precision,
        assumptions=tuple(assumptions + tower_notes + notes),
        unquantised_modules=unquantised,
        attributes={"rope_elements": str(rope_elements(f, context, layers))},
    )
    return spec if traits.known else _unknown_family(spec, f, family)


def _unknown_family(spec: ModelSpec, f: Fields, family: str) -> ModelSpec:
    """A family without traits: transformers' count when it is installed, else the assumption in words."""
    counted = count_modules(f.raw, len(spec.layers))
    if counted is None:
        note = (
            f"model type {family[:60]!r} is not known here: blocks are counted as Llama's (RMS norm, gated, "
            "no biases); usually within a few percent, install transformers (extra 'profile') for an exact count"
        )
        return replace(spec, assumptions=(*spec.assumptions, note))
    note = (
        f"model type {family[:60]!r}: counted from transformers {counted.version}; the cache follows the usual fields"
    )
    return replace(corrected(spec, counted), assumptions=(*spec.assumptions, note))


def _read_encoder_decoder(f: Fields, top: Fields, family: str, quant_config: Mapping[str, Any] | None) -> ModelSpec:
    e = read_encoder_decoder(f)
    precision, unquantised, notes = quantisation_of(f, top, quant_config, e.layers)
    notes.append(f"every request is taken to fill the encoder ({e.encoder_tokens} tokens)")
    return ModelSpec(
        name="",
        family=family,
        hidden=f.count("d_model"),
        vocab=f.count("vocab_size"),
        max_context=e.context,
        layers=e.layers,
        tie_embeddings=e.tied,
        final_norm_params=e.final_norm,
        embedding_extra_params=e.embedding_extra,
        towers=(e.encoder,),
        native_precision=precision,
        assumptions=tuple(notes),
        unquantised_modules=unquantised,
        attributes={"encoder_tokens": str(e.encoder_tokens)},
    )

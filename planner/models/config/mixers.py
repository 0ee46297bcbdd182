"""Token mixers: what each layer does with the sequence, from the fields of a config.json."""

from __future__ import annotations

from collections.abc import Mapping

from planner.errors import ModelConfigError
from planner.models.config.fields import MAX_CONTEXT, Fields
from planner.models.config.states import conv_mixer, delta_mixer, kda_mixer, lightning_mixer, mamba_mixer, rglru_mixer
from planner.models.config.traits import Traits
from planner.models.spec import Attention, LatentAttention, Mixer

_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "full": "full",
    "global": "full",
    "*": "full",
    "global_attention": "full",
    "sliding_attention": "sliding",
    "sliding": "sliding",
    "local_attention": "sliding",
    "swa": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "mamba": "mamba",
    "mamba2": "mamba",
    "M": "mamba",
    "deepseek_sparse_attention": "full",
    "indexed_attention": "full",
    "conv": "conv",
    "recurrent": "rglru",
    "hybrid": "hybrid",
    "mlp": "none",
    "-": "none",
    "moe": "none",
    "E": "none",
    "no_op": "none",
    "kda": "linear",
}


def layer_kinds(f: Fields, traits: Traits, layers: int) -> list[str]:
    """One of full, sliding, chunked, linear, mamba, hybrid, none for each layer, whichever way the config states it."""
    listed = f.items("layer_types", "layers_block_type", "block_types") or _pattern_string(f)
    if listed is not None:
        if f.has("block_types") and len(listed) < layers:
            listed = [listed[i % len(listed)] for i in range(layers)]
        if len(listed) < layers:
            raise ModelConfigError(
                f"config lists {len(listed)} layer types for {layers} layers",
                "",
                "Check num_hidden_layers and layer_types.",
            )
        unknown = sorted({str(k) for k in listed if not isinstance(k, str) or k not in _KINDS})
        if unknown:
            raise ModelConfigError(
                f"config names layer types nobody here knows: {', '.join(unknown)[:80]}",
                "",
                "Known: " + ", ".join(sorted(_KINDS)),
            )
        kinds = [_KINDS[k] for k in listed[:layers]]
        if not f.has("linear_num_key_heads", "linear_attn_config"):
            stateful = (
                "mamba" if f.has("mamba_num_heads", "mamba_n_heads", "mamba_d_state", "ssm_state_size") else "lightning"
            )
            kinds = [stateful if k == "linear" else k for k in kinds]
        return ["full" if k == "sliding" and not _window(f) else k for k in kinds]
    return _stated_rule(f, traits, layers)


def _pattern_string(f: Fields) -> list[str] | None:
    text = f.text("hybrid_override_pattern")
    return list(text.replace("|", "")) if text else None


def _window(f: Fields) -> int | None:
    return f.optional("sliding_window", "sliding_window_size", "window_size", low=0, high=MAX_CONTEXT) or None


def _stated_rule(f: Fields, traits: Traits, layers: int) -> list[str]:
    """Patterns given as periods, offsets and index lists."""
    if f.has("linear_attn_config"):
        inner = f.level("linear_attn_config")
        full = inner.indices("full_attn_layers") if inner else set()
        return ["full" if i + 1 in full else "linear" for i in range(layers)]
    if f.has("attn_layer_period"):
        period, offset = f.count("attn_layer_period"), f.count("attn_layer_offset", default=0, low=0)
        return ["full" if i % period == offset else "mamba" for i in range(layers)]
    if f.has("attn_layer_indices"):
        full = f.indices("attn_layer_indices")
        return ["full" if i in full else "mamba" for i in range(layers)]
    if f.has("full_attention_interval"):
        period = f.count("full_attention_interval")
        return ["full" if (i + 1) % period == 0 else "linear" for i in range(layers)]
    if f.has("hybrid_layer_pattern"):
        return ["sliding" if k else "full" for k in f.one_per_layer(layers, "hybrid_layer_pattern") or []]
    if f.has("mamba_d_ssm") and f.has("num_attention_heads"):
        return ["hybrid"] * layers
    if f.has("attn_type_list"):
        return ["full" if k else "lightning" for k in f.one_per_layer(layers, "attn_type_list") or []]
    if f.has("full_attn_idxs"):
        full = f.indices("full_attn_idxs")
        return ["full" if i in full else "conv" for i in range(layers)]
    if f.has("attention_chunk_size") and not f.has("sliding_window"):
        nope = f.items("no_rope_layers")
        return ["chunked" if (nope[i] if nope and i < len(nope) else (i + 1) % 4) else "full" for i in range(layers)]
    if not f.has("num_attention_heads", "n_head", "n_heads") and f.has("state_size", "ssm_state_size"):
        return ["mamba"] * layers
    return _windows(f, traits, layers)


def _windows(f: Fields, traits: Traits, layers: int) -> list[str]:
    if not _window(f) or (f.has("use_sliding_window") and not f.flag("use_sliding_window")):
        return ["full"] * layers
    every = f.optional("sliding_window_pattern", "_sliding_window_pattern", high=layers * 100) or traits.sliding_every
    if every:
        return ["full" if (i + 1) % every == 0 else "sliding" for i in range(layers)]
    first = f.optional("max_window_layers", low=0)
    if f.has("use_sliding_window") and first is not None:
        return ["full" if i < first else "sliding" for i in range(layers)]
    return ["sliding"] * layers


def says(f: Fields, rule: bool | str) -> bool:
    """A trait: true, false, or the config field that says so ('name=1' with its default)."""
    if isinstance(rule, bool):
        return rule
    name, _, default = rule.partition("=")
    return f.flag(name, default=default == "1")


def attention(f: Fields, traits: Traits, kind: str, index: int = 0) -> Attention:
    """A softmax attention layer of the given kind. Head width is read, and only when absent hidden / heads."""
    swa = kind == "sliding"
    hidden = f.count("hidden_size", "n_embd", "d_model", "dim")
    heads = (f.optional("swa_num_attention_heads") if swa else None) or f.count(
        "num_attention_heads", "n_head", "n_heads", "num_heads"
    )
    kv = _kv_heads(f, heads, swa)
    width = (
        (f.optional("swa_head_dim") if swa else f.optional("global_head_dim"))
        or f.optional("head_dim", "attention_head_dim", "kv_channels")
        or hidden // heads
    )
    if width < 1 or heads % kv:
        raise ModelConfigError(
            f"config has {heads} attention heads and {kv} key/value heads of width {width}",
            "heads must be a multiple of key/value heads",
            "Check the file.",
        )
    rule, _, switch = traits.qk_norm.partition("@")
    rule = rule if not switch or f.flag(switch) else ""
    shared = f.count("num_kv_shared_layers", default=0, low=0)
    reuses = shared > 0 and index >= f.count("num_hidden_layers") - shared
    norms = {
        "": 0,
        "head": (1 if reuses else 2) * width,
        "full": (heads + kv) * width,
        "per_head": (heads + kv) * width,
        "head_layer": 4 * width,
    }[rule]
    value = (f.optional("swa_v_head_dim") if swa else None) or f.optional("v_head_dim")
    window = (
        _window(f) if swa else (f.optional("attention_chunk_size", high=MAX_CONTEXT) if kind == "chunked" else None)
    )
    sinks = traits.sinks or (f.flag("add_swa_attention_sink_bias") if swa else f.flag("add_full_attention_sink_bias"))
    return Attention(
        heads,
        kv,
        width,
        value,
        window,
        kind if kind in ("sliding", "chunked") else "full",  # type: ignore[arg-type]
        says(f, traits.q_bias),
        says(f, traits.kv_bias),
        says(f, traits.o_bias),
        norms,
        output_gate=f.flag("attn_output_gate", default=traits.output_gate),
        sinks=sinks,
        shared_kv=reuses,
        shared_key_value=kind == "full" and f.flag("attention_k_eq_v"),
    )


def _kv_heads(f: Fields, heads: int, swa: bool) -> int:
    if swa and f.has("swa_num_key_value_heads"):
        return f.count("swa_num_key_value_heads")
    if not swa and f.has("num_global_key_value_heads"):
        return f.count("num_global_key_value_heads")
    if f.text("model_type").startswith(("falcon", "RefinedWeb")) and "num_key_value_heads" not in f.raw:
        if f.flag("new_decoder_architecture"):
            return f.count("num_kv_heads", "n_head_kv", default=heads)
        return 1 if f.flag("multi_query", default=True) else heads
    inner = f.level("attn_config")
    if inner and inner.has("kv_n_heads"):
        return inner.count("kv_n_heads")
    if f.flag("multi_query"):
        return f.count("multi_query_group_num", default=1)
    return f.count("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", default=heads)


def latent_attention(f: Fields, index: int = 0) -> LatentAttention:
    """MLA, with the sparse indexer of DeepSeek V3.2 when its fields are there."""
    heads, q_rank = f.count("num_attention_heads"), f.optional("q_lora_rank", low=0) or None
    hidden, extra, index_dim = f.count("hidden_size"), 0, 0
    indexers = f.items("indexer_types")
    shared = indexers is not None and index < len(indexers) and indexers[index] == "shared"
    if f.has("index_n_heads") and not shared:
        index_heads, index_dim = f.count("index_n_heads"), f.count("index_head_dim")
        extra = (q_rank or hidden) * index_heads * index_dim + hidden * index_dim + 2 * index_dim + hidden * index_heads
    if f.flag("mla_use_output_gate"):
        extra += hidden * heads * f.count("v_head_dim")
    return LatentAttention(
        heads,
        q_rank,
        f.count("kv_lora_rank"),
        f.count("qk_nope_head_dim"),
        f.count("qk_rope_head_dim", low=0),
        f.count("v_head_dim"),
        index_dim,
        f.optional("index_topk"),
        extra,
        indexer_heads=f.count("index_n_heads") if index_dim else 0,
    )


def mixers_of(f: Fields, traits: Traits, kind: str, index: int) -> tuple[Mixer, ...]:
    """The mixers of a layer of that kind; two for parallel hybrids."""
    if kind == "none":
        return ()
    if kind == "linear":
        return (kda_mixer(f) if f.has("linear_attn_config") else delta_mixer(f),)
    if kind in ("mamba", "conv", "lightning", "rglru"):
        return (
            {"mamba": mamba_mixer, "conv": conv_mixer, "lightning": lightning_mixer, "rglru": rglru_mixer}[kind](f),
        )
    if kind == "hybrid":
        return (attention(f, traits, "full", index), mamba_mixer(f))
    own = f.level("per_layer_config")
    override = own.raw.get(str(index)) if own else None
    if isinstance(override, Mapping):
        f = Fields({**f.raw, "global_head_dim": None, "num_global_key_value_heads": None, **override})
    if f.has("kv_lora_rank"):
        return (latent_attention(f, index),)
    return (attention(f, traits, kind, index),)

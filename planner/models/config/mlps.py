"""Channel mixers: dense and expert feed-forwards of each layer, from the fields of a config.json."""

from __future__ import annotations

from planner.errors import ModelConfigError
from planner.models.config.fields import Fields
from planner.models.config.mixers import says
from planner.models.config.traits import Traits
from planner.models.spec import DenseMlp, Mlp, MoeMlp

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def dense_mlp(f: Fields, traits: Traits, hidden: int) -> DenseMlp:
    """The dense feed-forward; ungated families that state no width have 4 x hidden (GPT-2, OPT, BLOOM, MPT, Falcon)."""
    width = f.optional(
        "intermediate_size_mlp",
        "dense_intermediate_size",
        "block_ff_dim",
        "intermediate_size",
        "n_inner",
        "ffn_hidden_size",
        "ffn_dim",
        "d_ff",
    )
    if width is None:
        if traits.gated:
            raise ModelConfigError(
                "config has no field 'intermediate_size'", "the feed-forward width cannot be known", "Check the file."
            )
        width = f.count("expansion_ratio", default=4) * hidden
    if f.text("model_type") == "recurrent_gemma":
        width //= 2
    if f.flag("block_auto_adjust_ff_dim"):
        multiple = f.count("block_multiple_of", default=256)
        width = int(f.number("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    return DenseMlp(width, traits.gated, says(f, traits.mlp_bias))


def moe_mlp(f: Fields, traits: Traits, hidden: int, experts: int) -> MoeMlp:
    """The expert feed-forward: routed, shared, router, gate of the shared expert."""
    width = f.optional("moe_intermediate_size", "expert_ffn_hidden_size") or f.count(
        "intermediate_size", "ffn_hidden_size"
    )
    top = f.count(
        "num_experts_per_tok",
        "experts_per_token",
        "num_experts_per_token",
        "moe_topk",
        "top_k_experts",
        "moe_k",
        "moe_top_k",
        default=_top_default(f),
    )
    if top > experts:
        raise ModelConfigError(
            f"config routes each token to {top} of {experts} experts", "", "Check num_experts_per_tok."
        )
    shared = f.optional(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
        low=0,
    )
    if shared is None:
        shared = width * f.count("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0, low=0)
    if f.text("model_type") in ("llama4_text", "llama4"):
        shared = width
    if f.flag("enable_moe_block"):
        shared = f.count("intermediate_size")
    router = experts * hidden + experts * traits.router_bias + (hidden + experts) * f.flag("enable_moe_block")
    if (
        f.text("topk_method") == "noaux_tc"
        or f.flag("use_routing_bias")
        or (f.has("routed_scaling_factor") and f.text("scoring_func") == "sigmoid")
    ):
        router += experts
    if f.text("model_type").startswith("ernie4_5_moe"):
        router += experts
    extra = hidden if f.text("model_type").startswith(("qwen2_moe", "qwen3_next", "qwen3_5")) and shared else 0
    latent = f.optional("routed_expert_hidden_size")
    if latent:
        extra += 2 * hidden * latent + latent * f.flag("latent_moe_use_norm")
    return MoeMlp(experts, top, width, shared, traits.gated, traits.expert_bias, router, extra, latent)


def _top_default(f: Fields) -> int | None:
    return 1 if f.text("model_type").startswith("llama4") else None


def mlps_of(f: Fields, traits: Traits, hidden: int, layers: int) -> list[Mlp]:
    """The feed-forward of each layer: dense first layers, expert periods and explicit lists."""
    inner = f.level("ffn_config")
    if inner and inner.has("moe_num_experts"):
        router = inner.count("moe_num_experts") * hidden
        one = MoeMlp(
            inner.count("moe_num_experts"),
            inner.count("moe_top_k"),
            inner.count("ffn_hidden_size"),
            router_params=router,
        )
        return [one] * layers
    experts = next((f.count(n, low=0) for n in EXPERTS if f.has(n)), 0)
    if experts <= 1:
        return [dense_mlp(f, traits, hidden)] * layers
    moe, routed = moe_mlp(f, traits, hidden, experts), _routed_layers(f, layers)
    dense = moe if all(routed) else dense_mlp(f, traits, hidden)
    return [moe if r else dense for r in routed]


def _routed_layers(f: Fields, layers: int) -> list[bool]:
    kinds = f.one_per_layer(layers, "mlp_layer_types")
    if kinds is not None:
        return [k in ("sparse", "moe", "hash_moe") for k in kinds]
    freq = f.one_per_layer(layers, "moe_layer_freq")
    if freq is not None:
        return [bool(x) for x in freq]
    first = f.count("first_k_dense_replace", "moe_layer_start_index", default=0, low=0)
    dense = f.indices("mlp_only_layers")
    listed = f.indices("moe_layers")
    if listed:
        return [i in listed for i in range(layers)]
    if f.has("expert_layer_period"):
        period, offset = f.count("expert_layer_period"), f.count("expert_layer_offset", default=0, low=0)
        return [i % period == offset for i in range(layers)]
    step = f.count(
        "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", "moe_layer_interval", default=1
    )
    return [i >= first and i not in dense and (i + 1) % step == 0 for i in range(layers)]

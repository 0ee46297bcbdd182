"""Layouts that no general rule covers."""

from __future__ import annotations

from dataclasses import replace

from planner.errors import ModelConfigError
from planner.models.config.fields import Fields, whole
from planner.models.config.mixers import mixers_of, says
from planner.models.config.mlps import moe_mlp
from planner.models.config.traits import Traits
from planner.models.spec import Attention, DenseMlp, LatentAttention, Layer, MoeMlp


def nemotron_layers(f: Fields, traits: Traits, kinds: list[str], norms: int) -> tuple[Layer, ...]:
    """Nemotron-H: every block is ONE mixer, one dense feed-forward or one expert feed-forward, with one norm."""
    hidden = f.count("hidden_size")
    names = f.items("layers_block_type") or list(f.text("hybrid_override_pattern"))
    dense = DenseMlp(f.count("intermediate_size"), traits.gated, says(f, traits.mlp_bias))
    moe = _nemotron_moe(f, hidden) if f.has("n_routed_experts") else None
    made: dict[str, Layer] = {}
    for name, kind in zip(names, kinds, strict=False):
        if name not in made:
            mlp = moe if name in ("E", "moe") else (dense if name in ("-", "mlp") else None)
            made[name] = Layer(mixers_of(f, traits, kind, 0), mlp, norms)
    return tuple(made[n] for n in names[: len(kinds)])


def _nemotron_moe(f: Fields, hidden: int) -> MoeMlp:
    """Experts may work in a latent width: down and up projections around them."""
    experts, width = f.count("n_routed_experts"), f.count("moe_intermediate_size")
    shared = f.count("moe_shared_expert_intermediate_size", default=0, low=0) * f.count(
        "n_shared_experts", default=1, low=0
    )
    latent = f.optional("moe_latent_size")
    extra = 2 * hidden * latent if latent else 0
    return MoeMlp(
        experts, f.count("num_experts_per_tok"), width, shared, False, False, experts * hidden + experts, extra, latent
    )


def v4_layers(f: Fields, layers: int, norms: int) -> tuple[Layer, ...]:
    """DeepSeek V4: one 512-wide key/value vector, cached per token in a window and compressed 4 or 128 times beyond it,
    low-rank grouped output, hyper-connections. Shapes from transformers' deepseek_v4."""
    hidden, width, heads = f.count("hidden_size"), f.count("head_dim"), f.count("num_attention_heads")
    ratios = f.items("compress_ratios")
    if ratios is None:
        names, rates = f.items("layer_types") or [], f.level("compress_rates")
        ratios = [rates.count(str(n), default=0, low=0) if rates else 0 for n in names]
    if len(ratios) < layers:
        raise ModelConfigError(
            "config field 'compress_ratios' is shorter than the number of layers", "", "Check the file."
        )
    streams = f.count("hc_mult", default=1)
    mixing = (streams * streams + 2 * streams) * (streams * hidden + 1) + 3 if streams > 1 else 0
    mlp = moe_mlp(f, Traits(), hidden, f.count("n_routed_experts"))
    hashed = f.count("num_hash_layers", default=0, low=0)
    plain = replace(mlp, router_params=mlp.experts * hidden)
    made: dict[tuple[int, bool], Layer] = {}
    result = []
    for i in range(layers):
        key = (whole(ratios[i], "compress_ratios", 0), i < hashed)
        if key not in made:
            mixer = _v4_mixer(f, key[0], (hidden, width, heads))
            made[key] = Layer((mixer,), plain if key[1] else mlp, norms + 2 * mixing)
        result.append(made[key])
    return tuple(result)


def _v4_mixer(f: Fields, ratio: int, sizes: tuple[int, int, int]) -> LatentAttention:
    hidden, width, heads = sizes
    rank, groups, out_rank = f.count("q_lora_rank"), f.count("o_groups"), f.count("o_lora_rank")
    params = hidden * rank + rank + rank * heads * width + hidden * width + width + heads
    params += heads * width // groups * groups * out_rank + groups * out_rank * hidden
    index = f.count("index_head_dim") if ratio == 4 else 0
    if ratio:
        wide = 2 if index else 1
        params += ratio * wide * width + 2 * hidden * wide * width + width
    if index:
        index_heads = f.count("index_n_heads")
        params += 4 * 2 * index + 2 * hidden * 2 * index + index + rank * index_heads * index + hidden * index_heads
    rope = f.count("qk_rope_head_dim")
    return LatentAttention(
        heads,
        rank,
        width - rope,
        width - rope,
        rope,
        width,
        index,
        f.optional("index_topk") if index else None,
        indexer_heads=f.count("index_n_heads") if index else 0,
        compression=ratio,
        window=f.count("sliding_window", default=0, low=0),
        params_count=params,
    )


def nas_layers(f: Fields, layers: int, hidden: int) -> tuple[Layer, ...]:
    """Nemotron-NAS (DeciLM): each block has its own key/value heads and feed-forward width, or lacks a part."""
    heads = f.count("num_attention_heads")
    dim = f.count("head_dim", default=max(1, hidden // heads))
    blocks = f.items("block_configs") or []
    if len(blocks) < layers:
        raise ModelConfigError(f"config has {len(blocks)} block_configs for {layers} layers", "", "Check the file.")
    return tuple(_nas_block(Fields(b, "block_configs."), heads, dim, hidden) for b in blocks[:layers])


def _nas_block(block: Fields, heads: int, dim: int, hidden: int) -> Layer:
    attn, ffn = block.level("attention") or Fields({}), block.level("ffn") or Fields({})
    norms, extra = 0, 0
    mixers: tuple[Attention, ...] = ()
    mlp: DenseMlp | None = None
    if attn.flag("replace_with_linear"):
        norms, extra = norms + hidden, hidden * hidden
    elif not attn.flag("no_op"):
        norms += hidden
        mixers = (Attention(heads, max(1, heads // attn.count("n_heads_in_group", default=1)), dim),)
    if ffn.flag("replace_with_linear"):
        norms, extra = norms + hidden, extra + hidden * hidden
    elif not ffn.flag("no_op"):
        norms += hidden
        width = int(2 * ffn.number("ffn_mult", default=4.0) * hidden / 3)
        mlp = DenseMlp(-(-width // 256) * 256)
    return Layer(mixers, mlp, norms + extra)


def extra_norms(f: Fields, traits: Traits, mlp: object, hidden: int) -> int:
    """Norm and gate parameters of a block beyond the family's count."""
    family = f.text("model_type")
    extra = 0
    if (
        family in ("falcon", "RefinedWeb", "RefinedWebModel")
        and not f.flag("new_decoder_architecture")
        and f.flag("parallel_attn", default=True)
    ):
        extra -= 2 * hidden
    if family == "bitnet" and isinstance(mlp, DenseMlp):
        extra += hidden + mlp.intermediate
    if family == "apertus":
        extra += 2
    if family.startswith("gemma4"):
        if isinstance(mlp, MoeMlp):
            extra += 3 * hidden
        side = f.count("hidden_size_per_layer_input", default=0, low=0)
        extra += 2 * hidden * side + hidden if side else 0
    return extra


def model_extra(f: Fields, hidden: int, layers: int) -> int:
    """Parameters beside the embedding that belong to no block: Gemma's per-layer inputs, DeepSeek V4's head mixing."""
    total = 0
    side = f.count("hidden_size_per_layer_input", default=0, low=0) if f.text("model_type").startswith("gemma4") else 0
    if side:
        total += (
            f.count("vocab_size_per_layer_input", default=f.count("vocab_size")) * layers * side
            + hidden * layers * side
            + side
        )
    streams = f.count("hc_mult", default=1) if f.has("compress_ratios", "compress_rates") else 1
    return total + (streams * (streams * hidden + 1) + 1 if streams > 1 else 0)

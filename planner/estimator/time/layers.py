"""Time of one layer of a model on S shards: projections, attention, feed-forward, collectives.

Everything a token passes through alone (`tokenwise`) depends on the tokens of a step; attention over the cache depends on the
sequences and their context. Shapes: tokens (S, G) or (G,), results (S, G) seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.estimator.time.all_reduce import SwitchReduce
from planner.estimator.time.collectives import Fabric, all_gather_s, all_to_all_s, reduce_scatter_s
from planner.estimator.time.kernels import (
    CacheShape,
    Devices,
    MoeShape,
    decode_attention_s,
    every_expert_tokens,
    gemm_s,
    moe_s,
    prefill_attention_s,
    streaming_s,
)
from planner.estimator.time.surfaces import FloatArray, Stack
from planner.models.spec import Attention, DenseMlp, LatentAttention, Layer, Mixer, MoeMlp

ACTIVATION_BYTES = 2.0


@dataclass(frozen=True)
class Cut:
    """How S replicas are cut, as (S,): ranks of the tensor group, of one attention group, expert-parallel ranks; the collectives of the groups.

    every_expert: the kernels load the weights of all experts, however few tokens there are."""

    dev: Devices
    tensor: FloatArray
    attention: FloatArray
    experts: FloatArray
    tensor_group: Fabric
    tensor_reduce: SwitchReduce
    attention_reduce: SwitchReduce
    moe_stack: Stack | None
    decode_stack: Stack
    every_expert: bool = False

    @property
    def groups(self) -> FloatArray:
        """Attention groups per replica (S, 1): each has its own sequences."""
        return (self.tensor / self.attention)[:, None]


def mixer_tokenwise_s(cut: Cut, mixer: Mixer, hidden: int, m: FloatArray) -> FloatArray:
    """Projections of a mixer with the small kernels around them, for m tokens per replica."""
    dev, ranks = cut.dev, cut.attention
    m = m / cut.groups
    share = dev.quantises_attention
    full = np.full_like(ranks, float(hidden))
    if isinstance(mixer, Attention):
        q = np.ceil(mixer.heads / ranks) * mixer.head_dim
        kv = (
            0
            if mixer.shared_kv or mixer.cross
            else np.ceil(mixer.kv_heads / ranks) * (mixer.head_dim + mixer.value_dim)
        )
        out = np.ceil(mixer.heads / ranks) * mixer.value_dim
        qkv = q * (2 if mixer.output_gate else 1) + kv
        time = gemm_s(dev, m, qkv, full, share) + gemm_s(dev, m, full, out, share)
        if mixer.qk_norm_params:
            keys = 0 if mixer.shared_kv or mixer.cross else np.ceil(mixer.kv_heads / ranks) * mixer.head_dim
            time = time + streaming_s(dev, m * (2 * (q + keys))[:, None] * ACTIVATION_BYTES, 2.0)
        return np.asarray(time + streaming_s(dev, m * (2 * qkv)[:, None] * ACTIVATION_BYTES, 2.0))
    if isinstance(mixer, LatentAttention):
        heads = np.ceil(mixer.heads / ranks)
        qk = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
        latent = np.full_like(ranks, float(mixer.cache_dim))
        lora = np.full_like(ranks, float(mixer.kv_lora_rank))
        time = gemm_s(dev, m, latent, full, share) + gemm_s(dev, m, full, heads * mixer.v_head_dim, share)
        if mixer.q_lora_rank:
            rank = np.full_like(ranks, float(mixer.q_lora_rank))
            time = time + gemm_s(dev, m, rank, full, share) + gemm_s(dev, m, heads * qk, rank, share)
        else:
            time = time + gemm_s(dev, m, heads * qk, full, share)
        time = time + gemm_s(dev, m, heads * (mixer.qk_nope_head_dim + mixer.v_head_dim), lora, 0.0)
        return np.asarray(time + streaming_s(dev, m * (heads * qk * 2)[:, None] * ACTIVATION_BYTES, 4.0))
    width = np.ceil(mixer.params_count / hidden / ranks)
    time = gemm_s(dev, m, np.maximum(width * 2 / 3, 1), full, share) + gemm_s(
        dev, m, full, np.maximum(width / 3, 1), share
    )
    flops = m * mixer.flops_per_token / ranks[:, None]
    return np.asarray(time + flops / (dev.peak16 * 0.1) + streaming_s(dev, m * width[:, None] * ACTIVATION_BYTES, 4.0))


def mixer_decode_s(cut: Cut, mixer: Mixer, sequences: FloatArray, context: float) -> FloatArray:
    """One new token for each of `sequences` (per replica) over `context` cached tokens: reads the cache or the state."""
    dev, ranks = cut.dev, cut.attention
    sequences = sequences / cut.groups
    if isinstance(mixer, Attention):
        reach = float(min(context, mixer.window)) if mixer.window else float(context)
        heads, kv = np.ceil(mixer.heads / ranks), np.ceil(mixer.kv_heads / ranks)
        elements = mixer.head_dim + mixer.value_dim
        cache = CacheShape(kv, elements, 2.0 * heads * elements)
        return decode_attention_s(dev, cut.decode_stack, sequences, reach, cache)
    if isinstance(mixer, LatentAttention):
        heads = np.ceil(mixer.heads / ranks)
        reach = float(min(context, mixer.indexer_top_k)) if mixer.indexer_top_k else float(context)
        flops = 2.0 * heads * (2 * mixer.kv_lora_rank + mixer.qk_rope_head_dim)
        latents = CacheShape(np.ones_like(ranks), mixer.kv_lora_rank + mixer.qk_rope_head_dim, flops)
        time = decode_attention_s(dev, cut.decode_stack, sequences, reach, latents)
        scan = sequences * context * mixer.indexer_dim * dev.kv_bytes
        return time + (streaming_s(dev, scan, 2.0) if mixer.indexer_dim else 0.0)
    state = 2 * (
        mixer.state_elements * mixer.state_bytes_per_element + mixer.conv_elements * mixer.conv_bytes_per_element
    )
    return streaming_s(dev, sequences * state / ranks[:, None], 2.0)


def mixer_prefill_s(cut: Cut, mixer: Mixer, tokens: float) -> FloatArray:
    """Attention of one whole prompt against itself, (S, 1); state mixers do this work token by token."""
    ranks = cut.attention
    if isinstance(mixer, Attention):
        return prefill_attention_s(
            cut.dev, tokens, np.ceil(mixer.heads / ranks), mixer.head_dim + mixer.value_dim, mixer.window
        )
    if isinstance(mixer, LatentAttention):
        dims = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim + mixer.v_head_dim
        return prefill_attention_s(cut.dev, tokens, np.ceil(mixer.heads / ranks), dims, mixer.indexer_top_k)
    return np.zeros_like(cut.dev.peak)


def mlp_s(cut: Cut, layer: Layer, hidden: int, m: FloatArray) -> FloatArray:
    """Feed-forward of a layer for m tokens per replica, without its collective."""
    mlp, dev, ranks = layer.mlp, cut.dev, cut.tensor
    full = np.full_like(ranks, float(hidden))

    def dense(width: int, gated: bool, tokens: FloatArray) -> FloatArray:
        part = np.maximum(np.ceil(width / ranks), 1.0)
        up = part * (2 if gated else 1)
        return np.asarray(
            gemm_s(dev, tokens, up, full)
            + gemm_s(dev, tokens, full, part)
            + streaming_s(dev, tokens * (up + part)[:, None] * ACTIVATION_BYTES)
        )

    if mlp is None:
        return np.zeros(np.broadcast_shapes(m.shape, dev.peak.shape))
    if isinstance(mlp, DenseMlp):
        return dense(mlp.intermediate, mlp.gated, m)
    if cut.moe_stack is None:
        raise ValueError("a model with experts needs the expert surfaces")
    width = np.maximum(np.ceil(mlp.expert_intermediate * cut.experts / ranks), 1.0)
    shape = MoeShape(mlp.experts, mlp.experts_per_token, hidden, mlp.gated, width, cut.experts)
    router = gemm_s(dev, m, np.full_like(ranks, float(mlp.experts)), full, 0.0) + streaming_s(
        dev, m * hidden * ACTIVATION_BYTES, 3.0
    )
    routed = np.maximum(m, every_expert_tokens(mlp.experts, mlp.experts_per_token)) if cut.every_expert else m
    time = moe_s(dev, cut.moe_stack, routed, shape) + router
    return (
        np.asarray(time + dense(mlp.shared_intermediate, mlp.gated, m)) if mlp.shared_intermediate else np.asarray(time)
    )


def group_tokenwise_s(cut: Cut, layer: Layer, hidden: int, m: FloatArray) -> FloatArray:
    """What an attention group does for its own share of m tokens per replica, token by token: mixers' projections, norms."""
    time: FloatArray = streaming_s(cut.dev, m / cut.groups * hidden * 8 * ACTIVATION_BYTES, 2.0)
    for mixer in layer.mixers:
        time = time + mixer_tokenwise_s(cut, mixer, hidden, m)
    return time


def layer_tokenwise_s(cut: Cut, layer: Layer, hidden: int, m: FloatArray) -> FloatArray:
    """All of a layer that works token by token: mixers' projections, feed-forward, norms, collectives.

    Plain TP: two all-reduces of m hidden 2 bytes. With attention groups: the group's all-reduce, then gather and scatter
    around the feed-forward (dispatch and combine, top-k wide, under expert parallelism).
    """
    message = m * hidden * ACTIVATION_BYTES
    time = mlp_s(cut, layer, hidden, m) + group_tokenwise_s(cut, layer, hidden, m)
    plain = cut.groups <= 1
    whole = cut.tensor_reduce.time_s(message)
    if np.all(plain):
        return np.asarray(time + whole * (1.0 if layer.mlp is None else 2.0))
    time = time + np.where(plain, whole, cut.attention_reduce.time_s(message / cut.groups))
    if layer.mlp is None:
        return np.asarray(time)
    top = layer.mlp.experts_per_token if isinstance(layer.mlp, MoeMlp) else 1
    spread = 2 * all_to_all_s(cut.tensor_group, message * top / cut.tensor[:, None])
    gather = all_gather_s(cut.tensor_group, message) + reduce_scatter_s(cut.tensor_group, message)
    exchange = np.where(cut.experts[:, None] > 1, np.minimum(spread, gather), gather)
    return np.asarray(time + np.where(plain, whole, exchange))


def quantising_s(cut: Cut, layer: Layer, hidden: int, m: FloatArray) -> FloatArray:
    """Quantisation of the activations of a layer for m tokens per replica, (S, G), by kernels of their own: (2 + a) m k bytes for the k inputs of
    each product of attention and dense feed-forward (experts were measured with theirs; latent attention's are not counted). 0 where activations
    are 16 bit, or have a scale per block (gemm_s counts those for every engine)."""
    low = ((cut.dev.activation_bytes < ACTIVATION_BYTES) & (cut.dev.scales_blocks == 0)).astype(float)
    if not low.any():
        return np.zeros(np.broadcast_shapes(m.shape, low.shape))
    inputs: list[tuple[FloatArray, FloatArray | float]] = []
    full = np.full_like(cut.tensor, float(hidden))
    for mixer in layer.mixers:
        if isinstance(mixer, Attention):
            inputs += [(full, cut.groups), (np.ceil(mixer.heads / cut.attention) * mixer.value_dim, cut.groups)]
    if isinstance(layer.mlp, DenseMlp):
        inputs += [(full, 1.0), (np.maximum(np.ceil(layer.mlp.intermediate / cut.tensor), 1.0), 1.0)]
    per_byte = ACTIVATION_BYTES + cut.dev.activation_bytes
    total = sum((streaming_s(cut.dev, m / groups * k[:, None] * per_byte) for k, groups in inputs), np.zeros_like(low))
    return np.asarray(low * total)


def kernels_per_layer(layer: Layer) -> tuple[float, float]:
    """Kernels launched for a layer where nothing is fused, and quantisations of activations more where a precision has them."""
    count, products = 4.0, 0.0
    for mixer in layer.mixers:
        count += 6.0 if isinstance(mixer, Attention) else 9.0 if isinstance(mixer, LatentAttention) else 8.0
        count += 2.0 if isinstance(mixer, Attention) and mixer.qk_norm_params else 0.0
        products += 2.0
    if isinstance(layer.mlp, DenseMlp):
        return count + 3.0, products + 2.0
    return (count + 9.0, products + 2.0) if isinstance(layer.mlp, MoeMlp) else (count, products)

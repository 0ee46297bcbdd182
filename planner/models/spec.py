"""What is deployed: a ModelSpec is a list of layers, each a token mixer and a channel mixer, counted exactly.

Nothing here knows an architecture's name; the config reader turns names into layers. Counts are in elements
(parameters), widths in elements, windows and contexts in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class Attention:
    """Softmax attention with grouped key/value heads.

    window: tokens a position sees (sliding window, or chunk when kind is 'chunked'); None = full context.
    shared_kv: the layer reuses the KV cache of an earlier one (no K/V projections or cache of its own).
    cross: the layer attends to an encoder (KV constant per request). shared_key_value: one projection gives both
    (Gemma 4's global layers); the cache still holds both.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    window: int | None = None
    kind: Literal["full", "sliding", "chunked"] = "full"
    q_bias: bool = False
    kv_bias: bool = False
    o_bias: bool = False
    qk_norm_params: int = 0
    output_gate: bool = False
    sinks: bool = False
    shared_kv: bool = False
    cross: bool = False
    shared_key_value: bool = False

    @property
    def value_dim(self) -> int:
        """Width of one value head."""
        return self.v_head_dim if self.v_head_dim is not None else self.head_dim

    def params(self, hidden: int) -> int:
        """Parameters of q, k, v, o projections with their biases, head norms and sinks."""
        q = self.heads * self.head_dim
        gate = q if self.output_gate else 0
        k, v = (0, 0) if self.shared_kv else (self.kv_heads * self.head_dim, self.kv_heads * self.value_dim)
        v = 0 if self.shared_key_value else v
        out = self.heads * self.value_dim
        bias = q * self.q_bias + (k + v) * self.kv_bias + hidden * self.o_bias
        return hidden * (q + gate + k + v + out) + bias + self.qk_norm_params + (self.heads if self.sinks else 0)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA): one compressed KV vector per token, shared by all heads.

    extra_params: a sparse indexer and the like; indexer_dim: its key width cached per token (0 = none).
    compression: tokens that share one cached vector (DeepSeek V4; 0 = nothing but the window is cached); window: recent
    tokens cached uncompressed beside it; params_count: parameters where the usual shapes do not hold.
    """

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer_dim: int = 0
    indexer_top_k: int | None = None
    extra_params: int = 0
    indexer_heads: int = 0
    compression: int = 1
    window: int = 0
    params_count: int | None = None

    @property
    def cache_dim(self) -> int:
        """Elements cached per token: latent plus rotary key (plus indexer key), shared by `compression` tokens."""
        whole = self.kv_lora_rank + self.qk_rope_head_dim + self.indexer_dim
        return whole // self.compression if self.compression else 0

    def params(self, hidden: int) -> int:
        """Parameters of the down/up projections, the latent norms and the output projection."""
        if self.params_count is not None:
            return self.params_count
        qk = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.q_lora_rank:
            q = hidden * self.q_lora_rank + self.q_lora_rank + self.q_lora_rank * self.heads * qk
        else:
            q = hidden * self.heads * qk
        kv = hidden * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        kv += self.kv_lora_rank * self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        return q + kv + self.heads * self.v_head_dim * hidden + self.extra_params


@dataclass(frozen=True)
class StateMixer:
    """Linear attention, Mamba and their kin: a fixed state per sequence instead of a KV cache.

    state_elements / conv_elements: per sequence and layer; params_count as counted by the reader.
    flops_per_token: multiply-adds times two of the recurrence itself (projections are in params_count).
    """

    kind: Literal["mamba", "mamba2", "gated_delta", "lightning", "kda", "rwkv", "short_conv", "rglru"]
    params_count: int
    state_elements: int
    conv_elements: int
    state_bytes_per_element: float = 4.0
    conv_bytes_per_element: float = 2.0
    flops_per_token: float = 0.0
    heads: int | None = None

    def params(self, hidden: int) -> int:
        """Parameters of the mixer."""
        return self.params_count


@dataclass(frozen=True)
class DenseMlp:
    """Feed-forward block; gated = three matrices (SwiGLU, GeGLU), else two."""

    intermediate: int
    gated: bool = True
    bias: bool = False

    def params(self, hidden: int) -> int:
        """Parameters including biases."""
        up = 2 if self.gated else 1
        return hidden * self.intermediate * (up + 1) + ((up * self.intermediate + hidden) if self.bias else 0)

    def active_params(self, hidden: int) -> int:
        """Parameters a token passes through: all."""
        return self.params(hidden)


@dataclass(frozen=True)
class MoeMlp:
    """Mixture of experts. shared_intermediate: total width of shared experts (0 = none).

    router_params: router weights and biases; extra_params: shared-expert gate, latent projections and the like;
    expert_hidden: width that routed experts work in when it is not the model's.
    """

    experts: int
    experts_per_token: int
    expert_intermediate: int
    shared_intermediate: int = 0
    gated: bool = True
    expert_bias: bool = False
    router_params: int = 0
    extra_params: int = 0
    expert_hidden: int | None = None

    def expert_params(self, hidden: int) -> int:
        """Parameters of one routed expert."""
        return DenseMlp(self.expert_intermediate, self.gated, self.expert_bias).params(self.expert_hidden or hidden)

    def shared_params(self, hidden: int) -> int:
        """Parameters of the shared experts."""
        return DenseMlp(self.shared_intermediate, self.gated).params(hidden) if self.shared_intermediate else 0

    def params(self, hidden: int) -> int:
        """All experts, shared experts, router."""
        return (
            self.experts * self.expert_params(hidden)
            + self.shared_params(hidden)
            + self.router_params
            + self.extra_params
        )

    def active_params(self, hidden: int) -> int:
        """Parameters a token passes through."""
        return (
            self.experts_per_token * self.expert_params(hidden)
            + self.shared_params(hidden)
            + self.router_params
            + self.extra_params
        )


Mixer = Attention | LatentAttention | StateMixer
Mlp = DenseMlp | MoeMlp


@dataclass(frozen=True)
class Layer:
    """One block of the decoder: mixers (usually one; hybrids run several in parallel), a feed-forward, norms."""

    mixers: tuple[Mixer, ...]
    mlp: Mlp | None
    norm_params: int

    def params(self, hidden: int) -> int:
        """Parameters of the block."""
        return (
            sum(m.params(hidden) for m in self.mixers) + (self.mlp.params(hidden) if self.mlp else 0) + self.norm_params
        )

    def active_params(self, hidden: int) -> int:
        """Parameters a token passes through in this block."""
        return (
            sum(m.params(hidden) for m in self.mixers)
            + (self.mlp.active_params(hidden) if self.mlp else 0)
            + self.norm_params
        )


@dataclass(frozen=True)
class Tower:
    """Parameters beside the language decoder: vision or audio encoder, projector, text encoder, MTP head.

    layers and hidden are for activation and time estimates; loaded says whether an engine loads it for plain serving.
    """

    name: str
    params: int
    loaded: bool = True
    quantised: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A model as it is deployed. layers is the full list, first to last (equal layers are the same object).

    native_precision: name in precisions.yaml of the checkpoint's weights (bf16 unless quantised or fp32/fp16).
    assumptions: what the reader had to assume, in words; never empty-handed silence.
    """

    name: str
    family: str
    hidden: int
    vocab: int
    max_context: int
    layers: tuple[Layer, ...]
    tie_embeddings: bool
    final_norm_params: int
    embedding_extra_params: int = 0
    lm_head_bias: bool = False
    towers: tuple[Tower, ...] = ()
    native_precision: str = "bf16"
    hf_id: str = ""
    gated_repo: bool = False
    license_note: str = ""
    source: str = ""
    assumptions: tuple[str, ...] = ()
    checkpoint_bytes: int | None = None
    unquantised_modules: tuple[str, ...] = ()
    attributes: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    @cached_property
    def layer_groups(self) -> tuple[tuple[Layer, int], ...]:
        """Distinct layers with their counts, in order of first appearance."""
        counts: dict[Layer, int] = {}
        for layer in self.layers:
            counts[layer] = counts.get(layer, 0) + 1
        return tuple(counts.items())

    @cached_property
    def embedding_params(self) -> int:
        """Input embedding (plus learned positions and the like)."""
        return self.vocab * self.hidden + self.embedding_extra_params

    @cached_property
    def lm_head_params(self) -> int:
        """Output head that exists beside the embedding; 0 when tied (a bias still counts)."""
        return (0 if self.tie_embeddings else self.vocab * self.hidden) + (self.vocab if self.lm_head_bias else 0)

    @cached_property
    def body_params(self) -> int:
        """Parameters of all decoder layers."""
        return sum(layer.params(self.hidden) * n for layer, n in self.layer_groups)

    @cached_property
    def params_total(self) -> int:
        """All parameters of the checkpoint that an engine loads, tied embeddings counted once."""
        towers = sum(t.params for t in self.towers if t.loaded)
        return self.body_params + self.embedding_params + self.lm_head_params + self.final_norm_params + towers

    @cached_property
    def params_active(self) -> int:
        """Parameters a text token passes through (embedding look-up excluded when untied, head included)."""
        body = sum(layer.active_params(self.hidden) * n for layer, n in self.layer_groups)
        return body + self.vocab * self.hidden + self.final_norm_params

    @cached_property
    def moe_share(self) -> float:
        """Share of the layers that route tokens to experts."""
        routed = sum(n for layer, n in self.layer_groups if isinstance(layer.mlp, MoeMlp))
        return routed / max(1, len(self.layers))

    @property
    def is_moe(self) -> bool:
        """True when any layer routes tokens to experts."""
        return self.moe_share > 0

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.hf_id, self.params_total))

    def __hash__(self) -> int:
        return self._hash

"""Floating point operations a token costs, by layer kind. A multiply and an add are two operations.

matmul: 2 x parameters that a token passes through (norms and look-ups left out). attention: 2 x (key width + value
width) x heads for every position looked at. Numbers or arrays alike; lengths in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.models.spec import Attention, LatentAttention, Layer, Mixer, ModelSpec, StateMixer


@dataclass(frozen=True)
class Flops:
    """matmul: projections, feed-forwards, head; attention: scores and values; state: recurrences."""

    matmul: Any
    attention: Any
    state: Any

    @property
    def total(self) -> Any:
        """All of it."""
        return self.matmul + self.attention + self.state


def _least(a: Any, b: Any) -> Any:
    """Smaller of two numbers or arrays, without NumPy."""
    return (a + b - abs(a - b)) / 2


def matmul_flops_per_token(model: ModelSpec, head: bool = True) -> float:
    """2 x active parameters of the layers (without norms), plus the output head when logits are needed."""
    body = sum((layer.active_params(model.hidden) - layer.norm_params) * n for layer, n in model.layer_groups)
    return 2.0 * (body + (model.vocab * model.hidden if head else 0))


def _widths(mixer: Mixer, decode: bool) -> tuple[float, int | None, int]:
    """(operations per position looked at, window or top-k, tokens per position)."""
    if isinstance(mixer, Attention):
        return 2.0 * mixer.heads * (mixer.head_dim + mixer.value_dim), mixer.window if mixer.kind != "full" else None, 1
    if isinstance(mixer, LatentAttention):
        absorbed = 2 * mixer.kv_lora_rank + mixer.qk_rope_head_dim
        plain = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim + mixer.v_head_dim
        return 2.0 * mixer.heads * (absorbed if decode else plain), mixer.indexer_top_k, max(1, mixer.compression)
    return 0.0, None, 1


def _indexer(mixer: Mixer) -> float:
    return 2.0 * mixer.indexer_heads * mixer.indexer_dim if isinstance(mixer, LatentAttention) else 0.0


def _mixer_decode(mixer: Mixer, context: Any) -> Any:
    """Operations of one token that looks back over `context` positions."""
    per, most, shared = _widths(mixer, decode=True)
    seen = context / shared
    total = per * (_least(seen, most) if most else seen) + _indexer(mixer) * seen
    if isinstance(mixer, LatentAttention) and (mixer.window or not mixer.compression):
        near = per * _least(context, mixer.window or 1)
        return near if not mixer.compression else total + near
    return total


def _positions(tokens: Any, most: int | None) -> Any:
    """Sum over i = 1..tokens of min(i, most)."""
    if most is None:
        return tokens * (tokens + 1) / 2
    full = _least(tokens, most)
    return full * (full + 1) / 2 + (tokens - full) * most


def _mixer_prefill(mixer: Mixer, tokens: Any) -> Any:
    per, most, shared = _widths(mixer, decode=False)
    total = (
        per * _positions(tokens, most * shared if most else None) / shared
        + _indexer(mixer) * _positions(tokens, None) / shared
    )
    if isinstance(mixer, LatentAttention) and (mixer.window or not mixer.compression):
        near = per * _positions(tokens, mixer.window or 1)
        return near if not mixer.compression else total + near
    return total


def _state(layer: Layer) -> float:
    return sum(m.flops_per_token for m in layer.mixers if isinstance(m, StateMixer))


def decode_flops(model: ModelSpec, context: Any) -> Flops:
    """One new token after `context` tokens."""
    attention: Any = 0.0
    for layer, n in model.layer_groups:
        attention = attention + n * sum(_mixer_decode(m, context) for m in layer.mixers)
    state = sum(_state(layer) * n for layer, n in model.layer_groups)
    return Flops(matmul_flops_per_token(model), attention, state)


def prefill_flops(model: ModelSpec, tokens: Any) -> Flops:
    """A prompt of `tokens`; logits of the last position only. Latent attention is counted without absorption."""
    attention: Any = 0.0
    for layer, n in model.layer_groups:
        attention = attention + n * sum(_mixer_prefill(m, tokens) for m in layer.mixers)
    state = sum(_state(layer) * n for layer, n in model.layer_groups)
    matmul = matmul_flops_per_token(model, head=False) * tokens + 2.0 * model.vocab * model.hidden
    return Flops(matmul, attention, state * tokens)


def least_training_flops(model: ModelSpec, tokens: float, full: bool) -> float:
    """A lower bound of a training run: 6 per active weight and token (4 with frozen weights), attention left out."""
    return (6.0 if full else 4.0) * (model.params_active - model.vocab * model.hidden) * tokens

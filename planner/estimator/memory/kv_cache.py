"""KV cache and per-sequence state: what one sequence of a length costs on one rank of each stage, by engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from planner.estimator.memory.rules import KvRules, MemoryRules, memory_rules
from planner.estimator.memory.weights import stage_layers
from planner.models.precision import KvDtype
from planner.models.precision import kv_dtype as kv_named
from planner.models.spec import Attention, LatentAttention, Layer, Mixer, ModelSpec, StateMixer


@dataclass(frozen=True)
class WindowCost:
    """Layers that need at most `reach` tokens besides those in flight; block_bytes is one block of all of them."""

    window: int
    chunked: bool
    block_bytes: float


@dataclass(frozen=True)
class StageKv:
    """Cost of one sequence on a rank: full blocks by length, windowed blocks, and fixed bytes.

    block_tokens: tokens of a block; full_block_bytes: one block of all layers that hold the full length;
    group_bytes: bytes of one block of one layer group (what the engine hands out), groups: number of groups.
    """

    block_tokens: int
    full_block_bytes: float
    windows: tuple[WindowCost, ...]
    fixed_bytes: float
    group_bytes: float
    groups: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes a token adds while no window is full."""
        return (self.full_block_bytes + sum(w.block_bytes for w in self.windows)) / self.block_tokens


def mixer_token_bytes(mixer: Mixer, kv: KvDtype, ways: int) -> float:
    """Bytes a token leaves in the cache of one layer on one rank.

    Attention: ceil(kv_heads / ways), at least one, x (key + value width); latent: the same vector on every rank.
    """
    if isinstance(mixer, Attention):
        if mixer.shared_kv or mixer.cross:
            return 0.0
        return max(1, -(-mixer.kv_heads // ways)) * (mixer.head_dim + mixer.value_dim) * kv.bytes_per_element
    if isinstance(mixer, LatentAttention):
        latent = (mixer.kv_lora_rank + mixer.qk_rope_head_dim) * kv.bytes_per_element
        return (
            (latent + (mixer.indexer_dim + 4 if mixer.indexer_dim else 0)) / mixer.compression
            if mixer.compression
            else 0.0
        )
    return 0.0


def state_bytes(mixer: StateMixer, ways: int) -> float:
    """Fixed bytes per sequence of one state layer on one rank (the state is not quantised with the cache)."""
    return (
        mixer.state_elements * mixer.state_bytes_per_element + mixer.conv_elements * mixer.conv_bytes_per_element
    ) / ways


Bucket = tuple[int, bool, float]


def _buckets(layers: Sequence[Layer], kv: KvDtype, ways: int) -> tuple[dict[Bucket, int], list[float]]:
    """Attention layers by (window or 0, chunked, bytes per token), and the state bytes of each state layer."""
    found: dict[Bucket, int] = {}
    states = []
    alike: dict[int, list[Layer]] = {}  # equal layers are the same object (ModelSpec)
    for layer in layers:
        alike.setdefault(id(layer), []).append(layer)
    for same in alike.values():
        count = len(same)
        for mixer in same[0].mixers:
            if isinstance(mixer, StateMixer):
                states += [state_bytes(mixer, ways)] * count
                continue
            if isinstance(mixer, LatentAttention) and mixer.window:
                vector = (mixer.kv_lora_rank + mixer.qk_rope_head_dim) * kv.bytes_per_element
                found[mixer.window, False, vector] = found.get((mixer.window, False, vector), 0) + count
            per_token = mixer_token_bytes(mixer, kv, ways)
            if per_token:
                window = mixer.window or 0 if isinstance(mixer, Attention) and mixer.kind != "full" else 0
                key = (window, isinstance(mixer, Attention) and mixer.kind == "chunked", per_token)
                found[key] = found.get(key, 0) + count
    return found, states


def _cross_bytes(layers: Sequence[Layer], kv: KvDtype, ways: int, encoder_tokens: int) -> float:
    heads = [m for layer in layers for m in layer.mixers if isinstance(m, Attention) and m.cross]
    return sum(
        max(1, -(-m.kv_heads // ways)) * (m.head_dim + m.value_dim) * kv.bytes_per_element * encoder_tokens
        for m in heads
    )


def stage_kv(layers: Sequence[Layer], kv: KvDtype, ways: int, rules: KvRules, encoder_tokens: int = 0) -> StageKv:
    """What a sequence costs on a rank that holds `layers`."""
    buckets, states = _buckets(layers, kv, ways)
    fixed = _cross_bytes(layers, kv, ways, encoder_tokens) if encoder_tokens else 0.0
    distinct = {id(layer): layer for layer in layers}.values()
    compressed = any(isinstance(m, LatentAttention) and m.compression != 1 for layer in distinct for m in layer.mixers)
    if rules.sliding == "grouped" and not compressed and (len({(w, c) for w, c, _ in buckets}) > 1 or states):
        return _grouped(buckets, states, rules, fixed)
    block, full, windows = rules.block_tokens, 0.0, []
    for (window, chunked, per_token), count in buckets.items():
        if window and rules.sliding != "full":
            windows.append(WindowCost(window, chunked, per_token * count * block))
        else:
            full += per_token * count * block
    total = full + sum(w.block_bytes for w in windows)
    return StageKv(block, full, tuple(windows), fixed + sum(states), total, 1)


def _grouped(buckets: dict[Bucket, int], states: list[float], rules: KvRules, fixed: float) -> StageKv:
    """vLLM's uniform-page groups (v1/core/kv_cache_utils.py): every layer has pages of one size, layers of a kind are
    split into groups of equal count, the last one padded; a state layer takes one page per sequence, and the page is
    widened (longer blocks) until the largest state fits."""
    widest = max((b[2] for b in buckets), default=0.0)
    if not widest:
        return StageKv(rules.block_tokens, 0.0, (), fixed + sum(states), sum(states), 1)
    block = rules.block_tokens
    if states:
        block *= max(1, -(-int(max(states)) // int(widest * rules.block_tokens)))
    page = widest * block
    counts = [*buckets.values(), *([len(states)] if states else [])]
    size = max(counts) if max(counts) < min(counts) * rules.group_ratio else min(counts)
    full, windows = 0.0, []
    for (window, chunked, per_token), count in buckets.items():
        each = per_token * block if widest % per_token == 0 else page
        total = -(-count // size) * size * each
        if window:
            windows.append(WindowCost(window, chunked, total))
        else:
            full += total
    state_pages = -(-len(states) // size) * size * page
    groups = sum(-(-count // size) for count in counts)
    return StageKv(block, full, tuple(windows), fixed + state_pages, size * page, groups)


@lru_cache(maxsize=65536)
def stages_kv(
    model: ModelSpec,
    kv: KvDtype,
    tensor_parallel: int,
    pipeline_parallel: int,
    attention_data_parallel: int,
    rules: MemoryRules,
) -> tuple[StageKv, ...]:
    """StageKv of every pipeline stage, shape (pipeline_parallel,)."""
    ways = max(1, tensor_parallel // attention_data_parallel)
    encoder = int(model.attributes.get("encoder_tokens", "0"))
    return tuple(stage_kv(layers, kv, ways, rules.kv, encoder) for layers in stage_layers(model, pipeline_parallel))


def sequence_bytes(cost: StageKv, tokens: Any, in_flight_tokens: Any = 0) -> Any:
    """Bytes that a sequence of `tokens` takes on a rank (numbers or arrays).

    full: ceil(tokens / block) blocks; a window: what it reaches plus the tokens of the batch in flight, one block for
    the alignment; state and cross attention: fixed. Source: vLLM v1/kv_cache_interface.py (SlidingWindowSpec).
    """
    block = cost.block_tokens
    total = np.ceil(np.asarray(tokens) / block) * cost.full_block_bytes + cost.fixed_bytes
    for w in cost.windows:
        reach = (w.window if w.chunked else w.window - 1) + np.asarray(in_flight_tokens)
        held = np.minimum(reach, tokens)
        total = total + (np.ceil(held / block) + (0 if w.chunked else 1)) * w.block_bytes
    return total


def kv_bytes_per_token(
    model: ModelSpec,
    kv_cache_dtype: KvDtype | str = "bf16",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    attention_data_parallel: int = 1,
    engine: str = "vllm",
    version: str = "",
) -> float:
    """Bytes a token adds on the fullest stage's rank while no window is full, group padding included."""
    kv = kv_named(kv_cache_dtype) if isinstance(kv_cache_dtype, str) else kv_cache_dtype
    stages = stages_kv(
        model, kv, tensor_parallel, pipeline_parallel, attention_data_parallel, memory_rules(engine, version)
    )
    return max(s.bytes_per_token for s in stages)


def state_bytes_per_sequence(model: ModelSpec, tensor_parallel: int = 1, attention_data_parallel: int = 1) -> float:
    """Fixed state of one sequence on a rank, all stages together, without page padding."""
    ways = max(1, tensor_parallel // attention_data_parallel)
    return sum(
        state_bytes(m, ways) * n for layer, n in model.layer_groups for m in layer.mixers if isinstance(m, StateMixer)
    )


def pool_tokens(cost: StageKv, pool_bytes: float, rules: KvRules, max_model_len: int, in_flight_tokens: int) -> int:
    """Tokens the engine reports for a pool on one stage ('GPU KV cache size').

    blocks: blocks // groups x block_tokens (vLLM before 0.20); request: pool / bytes of one sequence of max_model_len,
    x max_model_len.
    """
    if pool_bytes <= 0 or cost.group_bytes <= 0:
        return 0
    if rules.tokens_of == "blocks" or not (cost.windows or cost.fixed_bytes):
        return int(pool_bytes // cost.group_bytes) // cost.groups * cost.block_tokens
    return int(pool_bytes / float(sequence_bytes(cost, max_model_len, in_flight_tokens)) * max_model_len)

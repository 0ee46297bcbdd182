"""How decoder layers are cut into pipeline stages for training, and what the stages that can be worst hold.

The last stage also computes the head, so where a framework allows it the last stage gets fewer layers:
n_last minimises max(ceil((L - n_last) / (P - 1)), n_last + head), head = FLOPs of the head in layers; of the others the
later stages get the remainder, since the first holds the embedding and the most micro-batches in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from planner.models.spec import Attention, LatentAttention, Layer, ModelSpec
from planner.space.train_rows import BoolArray, IntArray

FloatArray = npt.NDArray[np.float64]


def layer_flops_per_token(layer: Layer, hidden: int, seq_len: int) -> float:
    """Forward FLOPs of one token in a layer: 2 per active parameter, plus causal attention (half of seq_len)."""
    flops = 2.0 * layer.active_params(hidden)
    for mixer in layer.mixers:
        if isinstance(mixer, Attention):
            reach = min(mixer.window or seq_len, seq_len)
            flops += 2.0 * mixer.heads * (mixer.head_dim + mixer.value_dim) * (reach - reach * reach / (2 * seq_len))
        elif isinstance(mixer, LatentAttention):
            dims = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim + mixer.v_head_dim
            flops += mixer.heads * dims * seq_len
        else:
            flops += mixer.flops_per_token
    return flops


@lru_cache(maxsize=4096)
def split_layers(model: ModelSpec, seq_len: int, stages: int, uneven: bool) -> tuple[int, ...]:
    """Decoder layers of each stage, first to last; their sum is the number of layers."""
    total = len(model.layers)
    if stages == 1:
        return (total,)
    base, left = divmod(total, stages)
    last = base
    if uneven:
        mean = sum(layer_flops_per_token(x, model.hidden, seq_len) * n for x, n in model.layer_groups) / total
        head = 2.0 * model.vocab * model.hidden / mean
        most = total - (stages - 1)
        choices = range(max(1, base - int(head) - 2), min(most, base + 1) + 1)
        last = min(choices, key=lambda n: (max(-(-(total - n) // (stages - 1)), n + head), abs(n - base)))
    base, left = divmod(total - last, stages - 1)
    return (*(base + (1 if i >= stages - 1 - left else 0) for i in range(stages - 1)), last)


@dataclass(frozen=True)
class Stages:
    """For U pipeline degrees the three stages that can be worst: first, fullest of the middle, last.

    counts (U, 3, G): layers of each group; position (U, 3): number of the stage; embeds, heads (U, 3): holds the
    embedding, the head; total (G,): layers of each group in the model.
    """

    counts: FloatArray
    position: IntArray
    embeds: BoolArray
    heads: BoolArray
    total: FloatArray


def stages_of(model: ModelSpec, seq_len: int, pipelines: IntArray, uneven: BoolArray) -> Stages:
    """The stages of each pipeline degree (U,), cut unevenly where `uneven`."""
    groups = [layer for layer, _ in model.layer_groups]
    number = {id(layer): i for i, layer in enumerate(groups)}
    lookup = {layer: i for i, layer in enumerate(groups)}
    kinds = np.array([number.get(id(x), lookup[x]) for x in model.layers])
    weight = np.array([layer_flops_per_token(x, model.hidden, seq_len) for x in groups])
    totals = np.array([n for _, n in model.layer_groups], dtype=float)
    size = len(pipelines)
    counts, position = np.zeros((size, 3, len(groups))), np.zeros((size, 3), dtype=np.int64)
    for i, (stages, loose) in enumerate(zip(pipelines.tolist(), uneven.tolist(), strict=True)):
        sizes = split_layers(model, seq_len, stages, bool(loose))
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        table = np.stack([np.bincount(kinds[a:b], minlength=len(groups)) for a, b in pairwise(bounds)])
        middle = int(np.argmax(table[:-1] @ weight)) if stages > 1 else 0
        chosen = [0, middle, stages - 1]
        counts[i], position[i] = table[chosen], chosen
    return Stages(counts, position, position == 0, position == (pipelines - 1)[:, None], totals)

"""How decoder layers are cut into pipeline stages for training, and what the stages that can be worst hold.

The last stage also computes the head, so where a framework allows it the last stage gets fewer layers:
n_last minimises max(ceil((L - n_last) / (P - 1)), n_last + head), head = FLOPs of the head in layers; of the others the
later stages get the remainder, since the first holds the embedding and the most micro-batches in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from planner.models.spec import Attention, LatentAttention, Layer, ModelSpec
from planner.space.train_rows import IntArray, Split, compact

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


Cut = Literal["split", "floor", "piece"]


@dataclass(frozen=True)
class Stages:
    """For U combinations the S stages that can be worst; the rest hold no more of anything than one of these.

    counts (U, S, G): layers of each group; position (U, S): number of the stage; embeds, heads (U, S): share of the
    embedding, of the head (0 or 1); total (G,): layers of each group in the model.
    """

    counts: FloatArray
    position: IntArray
    embeds: FloatArray
    heads: FloatArray
    total: FloatArray


def _kinds(model: ModelSpec) -> IntArray:
    """Number of the group of each layer."""
    groups = [layer for layer, _ in model.layer_groups]
    number = {id(layer): i for i, layer in enumerate(groups)}
    lookup = {layer: i for i, layer in enumerate(groups)}
    return np.array([number.get(id(x), lookup[x]) for x in model.layers])


def _worst_stages(kinds: IntArray, groups: int, sizes: Split) -> tuple[FloatArray, IntArray]:
    """Layers of each group and number of the stages that can be worst: of equal stages the first, and the last stage.

    The first of equal stages keeps the most micro-batches (1F1B), and stage 0 the embedding.
    """
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    table = np.stack([np.bincount(kinds[a:b], minlength=groups) for a, b in pairwise(bounds)])
    seen: dict[tuple[int, ...], int] = {}
    for stage, row in enumerate(table[:-1].tolist()):
        seen.setdefault(tuple(row), stage)
    chosen = np.array([*seen.values(), len(sizes) - 1])
    return table[chosen].astype(float), chosen


def stages_of(
    model: ModelSpec, seq_len: int, pipelines: IntArray, uneven: bool, split: IntArray, splits: tuple[Split, ...]
) -> Stages:
    """The stages of each combination (U,) of pipeline degree and split (TrainRows.split)."""
    (degrees, wanted), at = compact(pipelines, split)
    kinds, groups = _kinds(model), len(model.layer_groups)
    cuts = [
        _worst_stages(kinds, groups, splits[k - 1] if k else split_layers(model, seq_len, p, uneven))
        for p, k in zip(degrees.tolist(), wanted.tolist(), strict=True)
    ]
    most = max(len(chosen) for _, chosen in cuts)
    counts = np.stack([table[np.minimum(np.arange(most), len(table) - 1)] for table, _ in cuts])
    position = np.stack([chosen[np.minimum(np.arange(most), len(chosen) - 1)] for _, chosen in cuts])
    totals = np.array([n for _, n in model.layer_groups], dtype=float)
    last = (position == (degrees - 1)[:, None]).astype(float)
    return Stages(counts[at], position[at], (position == 0).astype(float)[at], last[at], totals)


def floor_stages(model: ModelSpec, pipelines: IntArray, ends: bool) -> Stages:
    """One stage with the mean of everything, in last place: no split's worst stage holds less or takes less time.

    Some stage has at least the mean of any one thing; ends: with its share of embedding and head, which is right for
    each thing alone (time of a micro-batch, parameters) but not for their sum.
    """
    totals = np.array([n for _, n in model.layer_groups], dtype=float)
    share = 1.0 / pipelines[:, None]
    return Stages(
        share[:, :, None] * totals, (pipelines - 1)[:, None], share * float(ends), share * float(ends), totals
    )


def piece_stages(model: ModelSpec, pipelines: IntArray, split: IntArray, splits: tuple[Split, ...]) -> Stages:
    """One stage each: splits hold (number of the stage, its layers), layers taken as the model's mean layer."""
    pieces = np.array(splits, dtype=np.int64)[split - 1]
    totals = np.array([n for _, n in model.layer_groups], dtype=float)
    position = pieces[:, :1]
    counts = pieces[:, 1, None, None] * totals / totals.sum()
    last = (position == (pipelines - 1)[:, None]).astype(float)
    return Stages(counts, position, (position == 0).astype(float), last, totals)

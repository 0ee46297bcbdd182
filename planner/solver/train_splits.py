"""Which cuts of the layers into pipeline stages are worth an estimate, for one layout: those that no other cut beats.

A layout's step takes longer as its slowest stage takes longer, as its stage with the most parameters has more of them
and as its longest stage has more layers, and depends on the cut by nothing else. So for every most
number of layers that first, middle and last stage may have, the cut of least memory within them is enough: any cut has
such numbers, and the cut of least memory within them is no slower and needs no more. Stages s of n_s layers:

    least memory U with  sum_s min(cap_s, most layers of stage s within U) >= L

All layers count as the mean layer here, which is exact where they are alike; the estimate of a cut always is. No stage is
given more than MOST_OF_MEAN times the mean.
"""

from __future__ import annotations

from math import ceil

import numpy as np
import numpy.typing as npt

from planner.models.spec import Layer, ModelSpec, MoeMlp
from planner.solver.problem import pareto
from planner.space.train_rows import IntArray

FloatArray = npt.NDArray[np.float64]

MOST_OF_MEAN = 3


def longest_stage(layers: int, stages: int) -> int:
    """The most layers that any stage is given."""
    return min(layers - stages + 1, MOST_OF_MEAN * ceil(layers / stages) + 2)


def caps_of(layers: int, stages: int, head: float, other: float, longest: int) -> IntArray:
    """Most layers of each stage, (T, P): all combinations worth trying.

    head: time of the head in layers; other: parameters of the embedding or the head in layers. A middle stage of m layers
    goes with a first of at least m - other and a last of at least m - max(head, other): any shorter ones save nothing.
    """
    found = []
    for most in range(ceil(layers / stages), longest + 1):
        firsts = range(max(1, most - ceil(other)), most + 1)
        lasts = range(max(1, most - ceil(max(head, other))), most + 1)
        middle = [most] * (stages - 2)
        found += [[a, *middle, b] for a in firsts for b in lasts if a + sum(middle) + b >= layers]
    return np.array(found, dtype=np.int64).reshape(-1, stages)


def least_memory(stage_bytes: FloatArray, caps: IntArray, layers: int) -> IntArray:
    """For each row of caps (T, P) the cut of so many layers that needs least memory within them.

    stage_bytes (P, N): peak of stage s with 1 .. N layers. Layers to spare are taken off the longest stages.
    """
    rising = np.maximum.accumulate(stage_bytes, axis=1)
    levels = np.unique(rising)
    room = np.stack([np.searchsorted(row, levels, side="right") for row in rising], axis=1)
    fits = (np.minimum(caps[:, None, :], room[None]).sum(2) >= layers) & (room.min(1) >= 1)[None]
    caps, fits = caps[fits.any(1)], fits[fits.any(1)]
    sizes = np.minimum(caps, room[np.argmax(fits, axis=1)])
    left = sizes.sum(1) - layers
    while left.any():
        over = np.flatnonzero(left)
        sizes[over, np.argmax(sizes[over], axis=1)] -= 1
        left[over] -= 1
    return np.asarray(sizes)


def worth_trying(model: ModelSpec, stage_bytes: FloatArray, layer_s: float, head_s: float) -> IntArray:
    """Cuts (T, P) of the model's layers for one layout, none of them beaten by another in every respect.

    stage_bytes (P, N): peak of each stage with 1 .. N layers. layer_s, head_s: seconds of a micro-batch.
    """
    stages, longest = stage_bytes.shape
    layers, head = len(model.layers), head_s / layer_s
    other = model.vocab * model.hidden / (sum(_dense(x, model.hidden) * n for x, n in model.layer_groups) / layers)
    free = least_memory(stage_bytes, np.full((1, stages), longest), layers)
    useful = min(longest, int(free.max()) + ceil(head)) if len(free) else longest
    caps = caps_of(layers, stages, head, other, useful)
    if not len(caps):
        return caps
    sizes = np.unique(least_memory(stage_bytes, caps, layers), axis=0)
    peak = np.take_along_axis(stage_bytes[None], sizes[:, :, None] - 1, axis=2)[:, :, 0].max(1)
    longer = sizes[:, :-1].max(1)
    slot = np.maximum(longer, sizes[:, -1] + head)
    params = np.maximum(np.maximum(sizes[:, 0] + other, longer), sizes[:, -1] + other)
    points = np.stack([_places(x) for x in (slot, peak, params, sizes.max(1))], axis=1)
    return np.asarray(sizes[pareto(points)])


def _dense(layer: Layer, hidden: int) -> int:
    """Parameters of a layer without its routed experts."""
    mlp = layer.mlp
    return layer.params(hidden) - (mlp.experts * mlp.expert_params(hidden) if isinstance(mlp, MoeMlp) else 0)


def _places(values: npt.NDArray[np.generic]) -> IntArray:
    """Rank of each value, equal values alike."""
    return np.asarray(np.unique(values, return_inverse=True)[1], dtype=np.int64).reshape(-1)

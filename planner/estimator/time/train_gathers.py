"""How often DeepSpeed ZeRO-3 gathers its weights in a micro-batch: less than twice where they live on, more where recomputation is long.

Gathered ahead of their use until M elements live (stage3_max_live_parameters, prefetch runs at every module), weights are the last M at
all times: at the turn from forward to backward these are the last layers, which backward needs first and which are not gathered again. A
checkpoint of more than M is gathered again after its recomputation. Source: deepspeed 0.19.8 partitioned_param_coordinator.py; within 2%
of its rules replayed call by call (docs/validate.md), which are DeepSpeed's own count on two CPU ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planner.engines.training import Framework
from planner.models.spec import Attention, DenseMlp, Layer, ModelSpec, MoeMlp
from planner.space.train_rows import IntArray, compact

FloatArray = npt.NDArray[np.float64]


def module_sizes(layer: Layer, hidden: int) -> list[float]:
    """Elements of a layer's modules with weights, in the order of forward: projections of the mixer, feed-forward; routed experts are one
    module. A mixer of another kind than attention counts as one."""
    sizes: list[float] = []
    for mixer in layer.mixers:
        if isinstance(mixer, Attention):
            keys = 0 if mixer.shared_kv else mixer.kv_heads
            q = hidden * mixer.heads * mixer.head_dim * (2 if mixer.output_gate else 1)
            sizes += [q, hidden * keys * mixer.head_dim, hidden * keys * mixer.value_dim]
            sizes += [mixer.heads * mixer.value_dim * hidden]
        else:
            sizes.append(mixer.params(hidden))
    mlp = layer.mlp
    if isinstance(mlp, DenseMlp):
        sizes += [hidden * mlp.intermediate] * (3 if mlp.gated else 2)
    elif isinstance(mlp, MoeMlp):
        sizes += [
            mlp.router_params + mlp.extra_params,
            mlp.experts * mlp.expert_params(hidden),
            mlp.shared_params(hidden),
        ]
    return [float(size) for size in sizes]


def gathered_elements(
    layers: Sequence[Sequence[float]],
    *,
    embedding: float,
    head: float,
    tied: bool,
    interval: int,
    live: float,
    reuse: float,
) -> float:
    """Elements gathered in forward and backward of a micro-batch.

    layers: module sizes of each layer; interval: layers per checkpoint (0 = none); live, reuse: stage3_max_live_parameters and
    stage3_max_reuse_distance. Twice every layer and the embedding, once the head; less what lives through the turn; plus what a
    checkpoint releases before its own backward. A tied head is gathered apart from its use as embedding.
    """
    body = [size for layer in layers for size in layer]
    total = sum(body)
    if total + head + (0.0 if tied else embedding) <= live:
        return total + head + (0.0 if tied else embedding)
    kept, again, behind = 0.0, 0.0, head
    if not interval:
        for size in reversed(body):
            behind += size
            kept += size if behind <= live else 0.0
        return 2 * total + 2 * embedding + head - kept
    starts = range((len(layers) - 1) // interval * interval, -1, -interval)
    for start in starts:
        group = [size for layer in layers[start : start + interval] for size in layer]
        behind += sum(group)
        kept += sum(group) if behind <= live else 0.0
        after = 0.0
        for size in reversed(group):
            again += size if after + size > live and 2 * after >= reuse else 0.0
            after += size
    return 2 * total + 2 * embedding + head - kept + again


def gather_passes(model: ModelSpec, framework: Framework, tensor: IntArray, interval: IntArray) -> FloatArray:
    """Times that the weights are gathered in a micro-batch under ZeRO-3, per row: 2 where a framework gathers each layer for each pass."""
    live, reuse = framework.number("max_live_elements"), framework.number("max_reuse_elements")
    if not live:
        return np.full(len(tensor), 2.0)
    (ways, every), at = compact(tensor, interval)
    sizes = [module_sizes(layer, model.hidden) for layer in model.layers]
    vocab, found = float(model.vocab * model.hidden), []
    for t, k in zip(ways.tolist(), every.tolist(), strict=True):
        layers = [[size / t for size in layer] for layer in sizes]
        split = model.tie_embeddings or framework.number("embedding_split")
        embedding = vocab / t if split else vocab
        elements = gathered_elements(
            layers, embedding=embedding, head=vocab / t, tied=model.tie_embeddings, interval=k, live=live, reuse=reuse
        )
        whole = sum(map(sum, layers)) + embedding + (0.0 if model.tie_embeddings else vocab / t)
        found.append(elements / whole)
    return np.asarray(np.array(found)[at])

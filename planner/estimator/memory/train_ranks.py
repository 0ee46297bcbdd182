"""What a rank of each pipeline stage holds: parameters, activations kept, the checkpoint and logits of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.engines.training import Framework
from planner.estimator.memory.train_activations import activation_checkpoint_bytes, layer_kept_bytes, logits_bytes
from planner.estimator.memory.train_states import (
    PLAIN_BYTES,
    QLORA_PRECISION,
    adapter_params,
    rank_params,
)
from planner.estimator.train_stages import Stages
from planner.models.spec import ModelSpec
from planner.request import TrainJob
from planner.space.train_rows import IntArray, compact

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RankStage:
    """Facts of one pipeline stage for U combinations (each (U,))."""

    dense: FloatArray
    experts: FloatArray
    other: FloatArray
    frozen: FloatArray
    kept: FloatArray
    layers: FloatArray
    kept_layer: FloatArray
    checkpoint: FloatArray
    logits: FloatArray
    gathered: FloatArray
    largest: FloatArray
    head: FloatArray
    position: IntArray


Combos = tuple[IntArray, IntArray, IntArray, IntArray]


def rank_stages(
    model: ModelSpec, job: TrainJob, framework: Framework, combos: Combos, cut: Stages
) -> tuple[RankStage, ...]:
    """The stages that can be worst. combos: tensor, context, expert parallel, micro-batch size."""
    tensor, context, expert, micro = combos
    frozen_name = (job.frozen_precision or QLORA_PRECISION) if job.method == "qlora" else ""
    (ut, ue), at = compact(tensor, expert)
    params = rank_params(model, ut, ue, frozen_name, whole_embedding=not framework.number("embedding_split"))
    groups = [layer for layer, _ in model.layer_groups]
    tokens, ways = micro * float(job.seq_len) / context, tensor.astype(float)
    kept = np.stack(
        [layer_kept_bytes(g, model.hidden, job, framework, tokens=tokens, tensor=ways) for g in groups], axis=1
    )
    checkpoint = activation_checkpoint_bytes(model.hidden, job, framework, tokens, ways)
    logits = logits_bytes(model, job, framework, tokens, ways)
    adapters = np.array([adapter_params(model, job, g) for g in groups])
    full, found = job.method == "full", []
    for s in range(cut.counts.shape[1]):
        counts = cut.counts[:, s]
        other = params.embedding[at] * cut.embeds[:, s] + params.head[at] * cut.heads[:, s]
        if model.tie_embeddings:
            other = other - (params.embedding[at] - model.embedding_extra_params) * (cut.embeds[:, s] * cut.heads[:, s])
        dense, experts = (counts * params.dense[at]).sum(1), (counts * params.experts[at]).sum(1)
        present = np.where(counts > 0, 1.0, 0.0)
        layer_all = params.dense[at] + params.experts[at]
        largest = (present * layer_all).max(1)
        base = (counts * params.layer_bytes[at]).sum(1) + PLAIN_BYTES * other
        base = base if frozen_name else base * framework.number("frozen_bytes") / PLAIN_BYTES
        gathered = (
            PLAIN_BYTES * largest
            if not frozen_name
            else (present * params.layer_bytes[at]).max(1) + PLAIN_BYTES * largest / 4
        )
        zero = np.zeros(len(tensor))
        found.append(
            RankStage(
                dense + other if full else (counts * adapters).sum(1) / ways,
                experts if full else zero,
                other,
                zero if full else base,
                (counts * kept).sum(1),
                counts.sum(1),
                (present * kept).max(1),
                checkpoint,
                logits * cut.heads[:, s],
                gathered,
                largest,
                params.head[at] * cut.heads[:, s] if full else zero,
                cut.position[:, s],
            )
        )
    return tuple(found)

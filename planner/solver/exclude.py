"""Answers that are ruled out from outside, because a check of the real model refused them: what else they rule out.

A deployment that does not fit rules out every row that puts at least as much on the same GPU: the same layout with as many or
more sequences at once (serving), or as large or larger a micro-batch (training), whatever the offer or number of replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.engines.records import EngineSpec
from planner.engines.training import Framework
from planner.estimator.operating_point import IntArray
from planner.plan import Deployment
from planner.request import OFFLOADS
from planner.space.shard import Shard
from planner.space.train_rows import TrainRows

REFUSED = "refused by the check of the real model"


def serving_rows_ruled_out(
    shards: Sequence[Shard], engines: Sequence[EngineSpec], shard_of: IntArray, engine_of: IntArray, seqs: IntArray,
    excluded: Sequence[Deployment],
) -> NDArray[np.bool_]:  # fmt: skip
    """Which rows are ruled out. shard_of, engine_of, seqs: of each row."""
    out = np.zeros(len(seqs), dtype=np.bool_)
    for d in excluded:
        if d.serve is None or not d.offers:
            continue
        same = np.array([_same_shard(s, d) for s in shards], dtype=np.bool_)
        engine = np.array([e.name == d.engine for e in engines], dtype=np.bool_)
        out |= same[shard_of] & engine[engine_of] & (seqs >= d.serve.max_num_seqs)
    return out


def _same_shard(s: Shard, d: Deployment) -> bool:
    groups = d.serve.attention_data_parallel if d.serve else 1
    mine = (s.gpu.name, s.precision.name, s.kv_dtype.name, s.tensor_parallel, s.pipeline_parallel, s.expert_parallel)
    theirs = (d.offers[0].gpu, d.precision, d.kv_cache_dtype, d.tensor_parallel, d.pipeline_parallel, d.expert_parallel)
    return mine == theirs and s.attention_data_parallel == groups


def training_rows_ruled_out(
    gpu: str, frameworks: Sequence[Framework], rows: TrainRows, excluded: Sequence[Deployment]
) -> NDArray[np.bool_]:
    """Which rows on this GPU are ruled out."""
    out = np.zeros(len(rows), dtype=np.bool_)
    for d in excluded:
        if d.train is None or not d.offers or d.offers[0].gpu != gpu:
            continue
        named = np.array([f.name == d.engine for f in frameworks], dtype=np.bool_)
        out |= (
            named[rows.framework]
            & (rows.tensor_parallel == d.tensor_parallel)
            & (rows.pipeline_parallel == d.pipeline_parallel)
            & (rows.context_parallel == d.context_parallel)
            & (rows.data_parallel == d.data_parallel)
            & (rows.expert_parallel == d.expert_parallel)
            & (rows.zero_stage == d.train.zero_stage)
            & (rows.checkpoint_interval == d.train.checkpoint_interval)
            & (rows.offload == OFFLOADS.index(d.train.offload))
            & (rows.micro_batch_size >= d.train.micro_batch_size)
        )
    return out

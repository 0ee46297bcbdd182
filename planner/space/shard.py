"""One replica of a model laid over GPUs: what the estimators take. Frozen, hashable, free of prices."""

from __future__ import annotations

from dataclasses import dataclass

from planner.hardware.records import Gpu, Link
from planner.models.precision import KvDtype, Precision


@dataclass(frozen=True)
class Shard:
    """How a replica is cut: on which GPU, in which precision, over which links.

    tensor_link: link among the tensor-parallel ranks (None when tensor_parallel is 1); pipeline_link: link between
    neighbouring stages (None when pipeline_parallel is 1). expert_parallel and attention_data_parallel divide the
    tensor-parallel group (both 1 for dense models): attention runs on tensor_parallel / attention_data_parallel ranks,
    each group with its own sequences and KV cache.
    """

    gpu: Gpu
    precision: Precision
    kv_dtype: KvDtype
    tensor_parallel: int
    pipeline_parallel: int
    tensor_link: Link | None
    pipeline_link: Link | None
    expert_parallel: int = 1
    attention_data_parallel: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel * self.pipeline_parallel

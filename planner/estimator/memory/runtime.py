"""Memory that no tensor explains: context, communication buffers, CUDA graphs."""

from __future__ import annotations

import math

from planner.estimator.memory.rules import MemoryRules
from planner.models.spec import ModelSpec
from planner.space.shard import Shard
from planner.units import GIB

_FAST = ("nvswitch", "nvlink-mesh", "xgmi-mesh")


def runtime_bytes(rules: MemoryRules, tensor_parallel: int, pipeline_parallel: int, fast_link: bool) -> float:
    """Bytes outside the framework's allocator: more with tensor parallel over fast links (all-reduce workspaces)."""
    r = rules.runtime
    if tensor_parallel > 1:
        return (r.tp_base_gib + r.tp_per_rank_gib * tensor_parallel if fast_link else r.tp_plain_gib) * GIB
    return (r.pipeline_gib if pipeline_parallel > 1 else r.single_gib) * GIB


def shard_runtime_bytes(rules: MemoryRules, shard: Shard) -> float:
    """runtime_bytes of a shard, by its link."""
    fast = shard.tensor_link is not None and shard.tensor_link.kind in _FAST
    return runtime_bytes(rules, shard.tensor_parallel, shard.pipeline_parallel, fast)


def graphs_bytes(rules: MemoryRules, model: ModelSpec, tensor_parallel: int, stage_layers: int) -> float:
    """CUDA graphs of one stage: base + layers x (a + b hidden - c log2 TP) + d expert layers.

    Least squares over the vLLM 0.19 logs on H100 (engines/memory.yaml): median error 7%, 95th percentile 22%.
    """
    g = rules.graphs
    per_layer = (
        g.per_layer_gib + model.hidden * g.per_layer_hidden_gib - math.log2(tensor_parallel) * g.per_layer_tp_gib
    )
    return (g.base_gib + stage_layers * (max(0.0, per_layer) + model.moe_share * g.moe_layer_gib)) * GIB

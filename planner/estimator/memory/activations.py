"""Working memory of one step: the forward pass of a batch of tokens and the sampler's logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from planner.estimator.memory.rules import MemoryRules
from planner.models.spec import DenseMlp, Layer, ModelSpec, MoeMlp
from planner.units import GIB


@dataclass(frozen=True)
class ActivationCost:
    """Coefficients of the peak on one rank: per token of a batch, per sequence of a batch (last stage), fixed."""

    body_per_token: float
    live_per_token: float
    workspace_per_token: float
    sampler_per_sequence: float
    fixed: float


def mlp_token_bytes(layer: Layer, hidden: int, ways: int, tensor_parallel: int) -> tuple[float, float]:
    """(dense feed-forward, expert workspace) bytes of one token in 16 bit on one rank.

    Dense: gate/up result and activation. Experts: two shared buffers, max(gate/up, output) and activation, for each
    chosen expert (vLLM fused_moe workspaces).
    """
    mlp = layer.mlp
    if isinstance(mlp, DenseMlp):
        return (3 if mlp.gated else 2) * mlp.intermediate / ways * 2.0, 0.0
    if isinstance(mlp, MoeMlp):
        inter = mlp.expert_intermediate / tensor_parallel
        routed = (
            mlp.experts_per_token * (max((2 if mlp.gated else 1) * inter, mlp.expert_hidden or hidden) + inter) * 2.0
        )
        return (3 if mlp.gated else 2) * mlp.shared_intermediate / ways * 2.0, routed
    return 0.0, 0.0


@lru_cache(maxsize=65536)
def activation_cost(
    model: ModelSpec,
    precision_name: str,
    tensor_parallel: int,
    attention_data_parallel: int,
    last_stage: bool,
    rules: MemoryRules,
) -> ActivationCost:
    """Coefficients for one stage. Fitted on vLLM 0.15 to 0.19 logs (engines/memory.yaml); 21 dense and multimodal
    models within 6%, MoE within 8%."""
    ways, a = max(1, tensor_parallel // attention_data_parallel), rules.activation
    width = 4.0 if precision_name == "fp32" else 2.0
    pairs = [mlp_token_bytes(layer, model.hidden, ways, tensor_parallel) for layer, _ in model.layer_groups]
    hidden = model.hidden * width
    towers = any(t.loaded and t.name != "mtp" for t in model.towers)
    padded = -(-model.vocab // 64) * 64
    workspace = max((p[1] for p in pairs), default=0.0)
    if not a.moe_workspace or precision_name == "mxfp4":
        workspace = 0.0
    return ActivationCost(
        body_per_token=(a.body_hidden * hidden) + max((p[0] for p in pairs), default=0.0) * width / 2,
        live_per_token=hidden * (a.live_hidden + (1.0 if towers else 0.0)),
        workspace_per_token=workspace,
        sampler_per_sequence=(a.sampler_bytes + (2.0 if width == 4.0 else 0.0)) * padded if last_stage else 0.0,
        fixed=a.sampler_fixed_gib * GIB,
    )


def activation_bytes(cost: ActivationCost, max_num_seqs: Any, max_num_batched_tokens: Any) -> Any:
    """Peak bytes: max(body, hidden states kept + sampler) + expert workspace (numbers or arrays)."""
    tokens, seqs = np.asarray(max_num_batched_tokens), np.minimum(max_num_seqs, max_num_batched_tokens)
    sampler = seqs * cost.sampler_per_sequence + tokens * cost.live_per_token
    return np.maximum(tokens * cost.body_per_token, sampler) + tokens * cost.workspace_per_token + cost.fixed

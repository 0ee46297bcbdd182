"""Parameters on one training rank, and bytes of states per parameter by framework, optimizer and precision.

    states = weights W + gradients G + optimizer O bytes per trainable parameter, each sharded over the data-parallel
    ranks from its ZeRO stage on (optimizer 1, gradients 2, weights 3)

Known totals: 8 pure bf16, 16 FSDP fp32 shards, 18 Megatron and DeepSpeed ZeRO-2/3 (2P + 18P/n, 18P/n), 20 autocast DDP.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.engines.training import Framework, optimizer_state
from planner.estimator.memory.rules import memory_rules
from planner.estimator.memory.weights import _Layout, mixer_bytes, mlp_bytes
from planner.models.precision import precision as precision_named
from planner.models.spec import Attention, DenseMlp, LatentAttention, Layer, ModelSpec, MoeMlp
from planner.request import TrainJob

FloatArray = npt.NDArray[np.float64]
PLAIN_BYTES = 2.0
QLORA_PRECISION = "bnb-nf4"


@dataclass(frozen=True)
class StateBytes:
    """Bytes per trainable parameter. other_optimizer: of embedding and head; step: temporary of the optimizer step;
    host: moments that may move to host memory (paged); extra: unsharded copies (autocast, buckets)."""

    weights: float
    gradients: float
    optimizer: float
    other_optimizer: float
    step: float
    host: float
    extra: float


def train_state_bytes(job: TrainJob, framework: Framework) -> StateBytes:
    """Bytes of states per trainable parameter of this framework for the job's optimizer and precision."""
    state, n = optimizer_state(job.optimizer), framework.number
    pure = not state.master
    master = n("master_bytes") if state.master or n("forced_master") else 0.0
    weights = n("weights_bytes") if state.master or n("forced_master") else PLAIN_BYTES
    gradients = n("gradient_bytes") if state.master or n("forced_master") else PLAIN_BYTES
    copy = n("gradient_copy_bytes") if master else 0.0
    moments, other = state.moments, state.other_moments
    if (
        pure and state.name == "adamw-bf16" and master
    ):  # a 16-bit master and gradient copy (bf16_master_weights_and_grads)
        master, copy = PLAIN_BYTES, PLAIN_BYTES if copy else 0.0
    extra = 0.0 if pure else n("autocast_bytes")
    extra += n("fp8_copy_bytes") if job.precision == "fp8" else 0.0
    on_gpu = 0.0 if state.paged else moments
    return StateBytes(
        weights,
        gradients,
        optimizer=master + copy + on_gpu,
        other_optimizer=master + copy + (0.0 if state.paged else other),
        step=n("step_copies") * weights,
        host=moments if state.paged else 0.0,
        extra=extra,
    )


@dataclass(frozen=True)
class RankParams:
    """Parameters on one rank for U combinations of tensor and expert parallel.

    (U, G) dense and routed per layer of each group; (U,) of the embedding with towers, of the head with its norm.
    """

    dense: FloatArray
    experts: FloatArray
    embedding: FloatArray
    head: FloatArray
    layer_bytes: FloatArray


def _layer_params(layer: Layer, hidden: int, lay: _Layout, tensor: int, expert: int) -> tuple[float, float]:
    """Bytes of one layer on a rank: everything but routed experts, and routed experts.

    Routed experts: experts / expert_parallel each; cut over the tensor ranks only when expert_parallel is 1.
    """
    dense = sum(mixer_bytes(m, hidden, lay, tensor) for m in layer.mixers) + layer.norm_params * lay.plain
    if layer.mlp is None or isinstance(layer.mlp, DenseMlp):
        return dense + mlp_bytes(layer, hidden, lay, (tensor, tensor, 1)), 0.0
    cuts = (tensor, tensor, 1) if expert == 1 else (tensor, expert, expert)
    whole = mlp_bytes(layer, hidden, lay, cuts)
    rest = layer.mlp.shared_params(hidden) / tensor * lay.of("shared_experts", 0)
    rest += (layer.mlp.router_params + layer.mlp.extra_params) * lay.plain
    return dense + rest, whole - rest


def rank_params(
    model: ModelSpec,
    tensor: npt.NDArray[np.int64],
    expert: npt.NDArray[np.int64],
    quantised: str = "",
    whole_embedding: bool = False,
) -> RankParams:
    """Parameters per rank of each combination; layer_bytes (U, G): a frozen layer in the `quantised` precision.

    whole_embedding: tensor-parallel ranks keep all of an embedding that is not tied to the head.
    """
    rules = memory_rules("vllm", "")
    lay = _Layout(model, precision_named("bf16"), rules)
    frozen = _Layout(model, precision_named(quantised or "bf16"), rules)
    groups = [layer for layer, _ in model.layer_groups]
    shape = (len(tensor), len(groups))
    dense, experts, base = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for i, (t, e) in enumerate(zip(tensor.tolist(), expert.tolist(), strict=True)):
        for j, layer in enumerate(groups):
            dense[i, j], experts[i, j] = _layer_params(layer, model.hidden, lay, t, e)
            base[i, j] = sum(_layer_params(layer, model.hidden, frozen, t, e))
    towers = sum(t.params for t in model.towers if t.loaded)
    vocab = model.vocab * model.hidden / tensor
    embedding = vocab * tensor if whole_embedding and not model.tie_embeddings else vocab
    return RankParams(
        dense / PLAIN_BYTES, experts / PLAIN_BYTES, embedding + model.embedding_extra_params + towers,
        vocab + model.final_norm_params + (model.vocab / tensor if model.lm_head_bias else 0.0), base,
    )  # fmt: skip


def adapter_params(model: ModelSpec, job: TrainJob, layer: Layer) -> float:
    """LoRA parameters of one layer: rank * (in + out) of each targeted matrix (experts are not targeted)."""
    h, total, mlp = model.hidden, 0.0, layer.mlp
    if "attention" in job.lora_targets:
        for mixer in layer.mixers:
            if isinstance(mixer, Attention):
                q, k, v = (
                    mixer.heads * mixer.head_dim,
                    mixer.kv_heads * mixer.head_dim,
                    mixer.kv_heads * mixer.value_dim,
                )
                total += (h + q) + (h + k) + (h + v) + (h + mixer.heads * mixer.value_dim)
            elif isinstance(mixer, LatentAttention):
                total += 2 * h + (mixer.q_lora_rank or h) + 2 * mixer.heads * mixer.v_head_dim + mixer.cache_dim
            else:
                total += 2 * h + 2 * mixer.params_count / h
    if "mlp" in job.lora_targets and mlp is not None:
        width = mlp.shared_intermediate if isinstance(mlp, MoeMlp) else mlp.intermediate
        total += (3 if mlp.gated else 2) * (h + width) if width else 0.0
    return job.lora_rank * total


def frozen_kept(
    job: TrainJob, framework: Framework, zero: npt.NDArray[np.int64], frozen: FloatArray, shards: npt.ArrayLike
) -> FloatArray:
    """Bytes of frozen weights that a rank keeps: frozen / shards from the stage on that shards weights; 4-bit ones only where the framework
    shards those too. Training all weights freezes none."""
    splits = (zero >= framework.weight_stage) & framework.shards_frozen(job.method)
    return np.asarray(frozen / np.where(splits, shards, 1.0))

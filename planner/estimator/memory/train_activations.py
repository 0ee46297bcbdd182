"""Bytes that forward keeps for backward, per layer and micro-batch on one rank, and bytes of logits and loss.

kept = tokens (c_h h + c_q q + c_kv (k + v) + c_f f); Llama-3-8B fused: 41 s b h
checkpoint: tokens * 2 h (cut by tensor ranks only with sequence parallel)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planner.engines.training import Framework, KernelSet, optimizer_state
from planner.models.spec import Attention, DenseMlp, LatentAttention, Layer, ModelSpec
from planner.request import TrainJob

FloatArray = npt.NDArray[np.float64]
CHECKPOINT_BYTES = 2.0


def layer_kept_bytes(
    layer: Layer, hidden: int, job: TrainJob, framework: Framework, *, tokens: FloatArray, tensor: FloatArray
) -> FloatArray:
    """Bytes one layer keeps for `tokens` tokens of a rank (its share of the sequence), shape of tokens.

    Without sequence parallel only the widths inside attention and feed-forward are cut (arXiv:2205.05198 equation 2).
    """
    k: KernelSet = framework.kernels
    ways = tensor if framework.sequence_parallel else np.ones_like(tensor)
    wide = framework.number("autocast_hidden_bytes") if autocasts(job) else 0.0
    per = (k.hidden + wide) * hidden / ways
    adapters = 0.0
    for mixer in layer.mixers:
        if isinstance(mixer, Attention):
            q, kv = mixer.heads * mixer.head_dim, mixer.kv_heads * (mixer.head_dim + mixer.value_dim)
            per = per + k.q * q / tensor + k.kv * kv / np.minimum(tensor, mixer.kv_heads)
            per = per + k.scores * mixer.heads * job.seq_len / tensor
        elif isinstance(mixer, LatentAttention):
            q = mixer.heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
            per = per + 2 * (mixer.cache_dim + (mixer.q_lora_rank or 0))
            per = per + (k.q * q + k.kv * mixer.heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)) / tensor
        else:
            per = per + 2 * k.q * mixer.params_count / hidden / tensor
        adapters += 2 * job.lora_rank * 4
    mlp = layer.mlp
    if mlp is not None:
        coefficient = k.gated if mlp.gated else k.plain
        if isinstance(mlp, DenseMlp):
            per = per + coefficient * mlp.intermediate / tensor
        else:
            width = mlp.experts_per_token * mlp.expert_intermediate + mlp.shared_intermediate
            per = per + coefficient * width / tensor + 4 * mlp.experts_per_token * hidden / tensor
    if job.method != "full":
        copies = 3 * ("attention" in job.lora_targets) + ("mlp" in job.lora_targets)
        adapters += framework.number("adapter_copy_bytes") * copies * hidden * optimizer_state(job.optimizer).master
        per = per + framework.number("matrix_output_bytes") * _matrix_outputs(layer, hidden, tensor, ways)
        per = per + adapters - framework.number("frozen_saving") * _frozen_saving(layer, hidden, job, tensor, ways)
    return np.asarray(tokens * per)


def _frozen_saving(layer: Layer, hidden: int, job: TrainJob, tensor: FloatArray, ways: FloatArray) -> FloatArray:
    """Bytes a token that frozen weights need not keep: both norms' normalised input 2 h each, the input 2 h of attention and the
    inputs 2 h + 2 f of a dense feed-forward without adapters of their own."""
    saved = 4.0 * hidden / ways
    if "attention" not in job.lora_targets:
        saved = saved + 2.0 * hidden / ways
    if "mlp" not in job.lora_targets and isinstance(layer.mlp, DenseMlp):
        saved = saved + 2.0 * hidden / ways + 2.0 * layer.mlp.intermediate / tensor
    return np.asarray(saved)


def _matrix_outputs(layer: Layer, hidden: int, tensor: FloatArray, ways: FloatArray) -> FloatArray:
    """Outputs of a layer's matrices a token, in elements: q + k + v + h of attention, h and f or 2 f of a dense feed-forward."""
    found = np.zeros_like(tensor)
    for mixer in layer.mixers:
        if isinstance(mixer, Attention):
            kv = mixer.kv_heads * (mixer.head_dim + mixer.value_dim)
            found = found + (mixer.heads * mixer.head_dim + kv) / tensor + hidden / ways
    if isinstance(layer.mlp, DenseMlp):
        found = found + (1 + layer.mlp.gated) * layer.mlp.intermediate / tensor + hidden / ways
    return found


def autocasts(job: TrainJob) -> bool:
    """True where a framework that uses autocast keeps fp32 weights, and with them hidden states in fp32."""
    return job.method == "full" and optimizer_state(job.optimizer).master


def activation_checkpoint_bytes(
    hidden: int, job: TrainJob, framework: Framework, tokens: FloatArray, tensor: FloatArray
) -> FloatArray:
    """Bytes of one checkpointed layer input for `tokens` tokens: 2, with a residual stream in fp32 4 a hidden element."""
    ways = tensor if framework.sequence_parallel else np.ones_like(tensor)
    wide = framework.number("autocast_checkpoint_bytes") if autocasts(job) else framework.number("residual_bytes")
    each = CHECKPOINT_BYTES + wide
    return np.asarray(each * hidden * tokens / ways)


def logits_bytes(
    model: ModelSpec, job: TrainJob, framework: Framework, tokens: FloatArray, tensor: FloatArray
) -> FloatArray:
    """Logits with loss and gradient, c_V V + c_h h bytes a token; a chunked loss keeps one chunk of the first."""
    n = framework.number
    split = n("logits_split") or (model.tie_embeddings and n("tied_logits_split"))
    ways = tensor if split else np.ones_like(tensor)
    output = 0.0 if job.method == "full" else n("matrix_output_bytes")
    whole = (n("logits_bytes") + output) * model.vocab * tokens / ways
    beside = n("head_hidden_bytes") * model.hidden * tokens / (tensor if framework.sequence_parallel else 1.0)
    return np.asarray((whole / n("loss_chunks") if job.chunked_loss else whole) + beside)

"""Time of one decoder layer in training, forward and backward, on one rank: GEMMs by shape, attention, small kernels.

    forward  = max(GEMM + attention + streaming, launch)
    backward = max(2 GEMM + 2.5 attention + 2 streaming, 2 launch)

GEMM: 2 m n k / (peak * efficiency(n, k, m)); gradients of inputs and of weights are GEMMs of their own shapes (the
latter only where weights train). Efficiencies: hardware_catalog/kernels. All arrays are (U,): combinations of tensor,
context and expert parallel and micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.engines.training import Framework
from planner.estimator.time.kernels import device_constants, matmul_flops, peak_flops
from planner.estimator.time.surfaces import Stack, surface_of, table_of
from planner.hardware.records import Gpu, KernelFile
from planner.models.spec import Attention, DenseMlp, LatentAttention, Layer, MoeMlp
from planner.request import TrainJob
from planner.units import GB

FloatArray = npt.NDArray[np.float64]

ALIGNED = 128


@dataclass(frozen=True)
class Work:
    """U combinations on one GPU: tokens of a rank per micro-batch, sequences, ways cut; framework and job."""

    gpu: Gpu
    job: TrainJob
    framework: Framework
    tokens: FloatArray
    sequences: FloatArray
    tensor: FloatArray
    context: FloatArray
    expert: FloatArray

    @property
    def bandwidth(self) -> float:
        """Bytes/s of device memory that streaming kernels reach."""
        return self.gpu.bandwidth_gb_per_s * GB * device_constants(self.gpu)["streaming_efficiency"]

    @property
    def compute_dtype(self) -> str:
        """Key of Gpu.peak_tflops that GEMMs run in."""
        return self.job.precision


@dataclass(frozen=True)
class Passes:
    """Seconds of forward, of backward for inputs, of backward for weights; each (U,)."""

    forward: FloatArray
    inputs: FloatArray
    weights: FloatArray

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.inputs + other.inputs, self.weights + other.weights)


def _gemm_one(work: Work, m: FloatArray, n: FloatArray, k: FloatArray) -> FloatArray:
    """Seconds of an m x n x k product, compute or memory bound, at the efficiency of its shape, and never faster than any that was measured.

    t = max(max(compute, memory) / efficiency(shape), 2 m n k / matmul_flops) / efficiency(framework). Micro-batches are powers of two tokens, for which
    libraries are tuned best (up to 12% over the rows between on A100): they have a surface of their own.
    """
    name = surface_of(work.gpu).surface
    kernel = "gemm" if isinstance(name, KernelFile) else "gemm_powers"
    dtype = work.compute_dtype
    table = table_of(name, kernel, dtype if dtype in ("fp8", "fp4") else "bf16")
    stack = Stack(kernel, table[None], np.zeros(len(m), dtype=np.int64), (dtype,) * len(m))
    suffix = f"_{dtype}" if dtype in ("fp8", "fp4") else ""
    older = work.framework.number("gemm_before_hopper") if (work.gpu.compute_capability or 9) < 9 else 1.0
    efficiency = stack.efficiency(n, k, m[:, None])[:, 0]
    odd = (n % ALIGNED != 0) | (k % ALIGNED != 0)
    framework = (
        older
        * work.framework.number(f"gemm_efficiency{suffix}")
        * np.where(odd, work.framework.number("misaligned_efficiency"), 1.0)
    )
    element = 1.0 if dtype == "fp8" else 2.0
    compute = 2 * m * n * k / peak_flops(work.gpu, dtype)
    memory = (element * (n * k + m * k) + 2 * m * n) / (work.gpu.bandwidth_gb_per_s * GB)
    best = np.maximum(np.maximum(compute, memory) / efficiency, 2 * m * n * k / matmul_flops(work.gpu, dtype))
    return np.asarray(np.maximum(best / framework, device_constants(work.gpu)["kernel_floor_us"] * 1e-6))


def gemm(work: Work, n: FloatArray, k: FloatArray, tokens: FloatArray | None = None) -> Passes:
    """A linear layer n x k for all tokens of a rank (or `tokens`), three products."""
    m = work.tokens if tokens is None else tokens
    n, k = np.broadcast_to(n, m.shape).astype(float), np.broadcast_to(k, m.shape).astype(float)
    return Passes(_gemm_one(work, m, n, k), _gemm_one(work, m, k, n), _gemm_one(work, n, k, m))


def attention(work: Work, mixer: Attention | LatentAttention) -> Passes:
    """Attention core of a micro-batch: flops = 2 heads (d_k + d_v) pairs, half of seq^2 with flash attention.

    Without it (kernel set with scores) all pairs are computed and the scores stream through memory.
    """
    n, seq = work.framework.number, float(work.job.seq_len)
    if isinstance(mixer, Attention):
        dims, window = mixer.head_dim + mixer.value_dim, mixer.window
    else:
        dims, window = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim + mixer.v_head_dim, None
    heads = mixer.heads / work.tensor
    flash = work.framework.kernels.scores == 0
    reach = min(window or seq, seq)
    pairs = (seq * reach - reach * reach / 2) if flash else seq * seq
    flops = 2 * heads * dims * pairs * work.sequences / work.context
    table = table_of(surface_of(work.gpu).surface, "prefill_attention", "bf16")
    stack = Stack("prefill_attention", table[None], np.zeros(len(heads), dtype=np.int64), ("bf16",) * len(heads))
    efficiency = stack.efficiency(heads * work.sequences, np.full((len(heads), 1), reach))[:, 0]
    peak = peak_flops(work.gpu, "bf16")
    if not flash:
        scores = 2.0 * heads * pairs * work.sequences / work.context
        forward = flops / (peak * n("gemm_efficiency") * 0.5) + n("scores_passes") * scores / work.bandwidth
        return Passes(forward, 2 * forward, np.zeros_like(forward))
    modern = n("attention_hopper") if (work.gpu.compute_capability or 0) >= 9 else 1.0
    forward = flops / (peak * efficiency * n("attention_efficiency") * modern)
    back = forward * n("attention_backward") / n("attention_backward_efficiency")
    return Passes(forward, back, np.zeros_like(forward))


def _mixer(work: Work, layer: Layer, hidden: int) -> Passes:
    h, t = float(hidden), work.tensor
    zero = np.zeros_like(t)
    total = Passes(zero, zero, zero)
    for mixer in layer.mixers:
        if isinstance(mixer, Attention):
            q = mixer.heads * mixer.head_dim / t * (2 if mixer.output_gate else 1)
            kv = mixer.kv_heads / np.minimum(t, mixer.kv_heads) * (mixer.head_dim + mixer.value_dim)
            total = (
                total
                + gemm(work, q + kv, zero + h)
                + gemm(work, zero + h, mixer.heads * mixer.value_dim / t)
                + attention(work, mixer)
            )
        elif isinstance(mixer, LatentAttention):
            qk, rank = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim, mixer.q_lora_rank
            total = (
                total
                + gemm(work, zero + mixer.cache_dim, zero + h)
                + gemm(work, zero + h, mixer.heads * mixer.v_head_dim / t)
            )
            total = total + gemm(
                work, mixer.heads * (mixer.qk_nope_head_dim + mixer.v_head_dim) / t, zero + mixer.kv_lora_rank
            )
            total = total + gemm(work, mixer.heads * qk / t, zero + (rank or h)) + attention(work, mixer)
            if rank:
                total = total + gemm(work, zero + rank, zero + h)
        else:
            width = mixer.params_count / h / t
            total = total + gemm(work, width * 2 / 3, zero + h) + gemm(work, zero + h, width / 3)
            scan = work.tokens * mixer.flops_per_token / t / (peak_flops(work.gpu, "bf16") * 0.1)
            total = total + Passes(scan, 2 * scan, zero)
    return total


def _experts(work: Work, mlp: MoeMlp, hidden: int) -> Passes:
    """Routed experts: pairs = tokens * top / tensor on a rank, in as many GEMMs as experts it holds (grouped)."""
    balance = 1 + work.framework.number("moe_imbalance") * (work.expert > 1)
    width = np.where(work.expert > 1, 1.0, 1.0 / work.tensor) * mlp.expert_intermediate
    pairs = work.tokens * mlp.experts_per_token / np.where(work.expert > 1, work.tensor, 1.0) * balance
    local = np.maximum(1.0, mlp.experts / work.expert)
    each, h = pairs / local, np.full_like(width, float(mlp.expert_hidden or hidden))
    up = gemm(work, width * (2 if mlp.gated else 1), h, each)
    down = gemm(work, h, width, each)
    one, times = up + down, local / work.framework.number("expert_efficiency")
    return Passes(one.forward * times, one.inputs * times, one.weights * times)


def _feed_forward(work: Work, layer: Layer, hidden: int) -> Passes:
    mlp, t = layer.mlp, work.tensor
    zero = np.zeros_like(t)
    if mlp is None:
        return Passes(zero, zero, zero)
    if isinstance(mlp, DenseMlp):
        width = mlp.intermediate / t
        return gemm(work, width * (2 if mlp.gated else 1), zero + float(hidden)) + gemm(
            work, zero + float(hidden), width
        )
    total = _experts(work, mlp, hidden)
    if mlp.shared_intermediate:
        width = mlp.shared_intermediate / t
        total = (
            total
            + gemm(work, width * (2 if mlp.gated else 1), zero + float(hidden))
            + gemm(work, zero + float(hidden), width)
        )
    return total


def last_gemm_s(work: Work, layer: Layer, hidden: int) -> FloatArray:
    """Forward seconds of the last matrix of a layer, which recomputation need not reach: no tensor after it is needed by
    backward (torch.utils.checkpoint, early_stop). 0 for experts, whose outputs are weighted after it, and with adapters, which
    come after it."""
    if not isinstance(layer.mlp, DenseMlp) or work.job.method != "full":
        return np.zeros_like(work.tensor)
    return gemm(work, np.full_like(work.tensor, float(hidden)), layer.mlp.intermediate / work.tensor).forward


def layer_passes(work: Work, layer: Layer, hidden: int, kept_bytes: FloatArray) -> Passes:
    """One layer without communication. kept_bytes (U,): what forward keeps, measure of what small kernels move."""
    n = work.framework.number
    products = _mixer(work, layer, hidden) + _feed_forward(work, layer, hidden)
    stream = n("elementwise_factor") * kept_bytes / work.bandwidth
    frozen = work.job.method != "full"
    if frozen and work.job.method == "qlora":
        stream = stream + n("dequantise_factor") * 2.5 * layer.params(hidden) / work.tensor / work.bandwidth
    launch = (n("launch_us") + n("launch_tensor_us") * (work.tensor > 1)) * 1e-6 * (1.5 if frozen else 1.0)
    stream = stream + (n("expert_launch_us") * 1e-6 if isinstance(layer.mlp, MoeMlp) else 0.0)
    forward = np.maximum(products.forward + stream, launch)
    weights = 0.05 * products.weights if frozen else products.weights
    backward = np.maximum(products.inputs + weights + 2 * stream, 2 * launch)
    return Passes(forward, backward, np.zeros_like(forward))

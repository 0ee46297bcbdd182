"""Time of one kernel: roofline time / measured efficiency for its shape, and never under the floor of a launch.

    t = max(max(flops / peak, bytes / bandwidth) / efficiency(shape), floor)

Shapes: `Devices` describes S shards; every function takes per-shard extents (S,) and a grid (S, G) or (G,) and returns seconds
(S, G). Peaks are dense with fp32 accumulate. Source of the efficiencies: see surfaces.py; error: kernels/fit_error.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from planner.errors import InvalidValueError
from planner.estimator.time.surfaces import FloatArray, Stack, expert_curve, read_data, read_kernel_data, surface_of
from planner.hardware.records import Gpu, KernelFile
from planner.models.precision import Precision
from planner.space.shard import Shard
from planner.units import GB, TERA

SIXTEEN_BIT = ("bf16", "fp16")


@cache
def constants() -> dict[str, float]:
    """Constants of the kernel model by name (kernels.yaml holds unit, meaning and source)."""
    raw = read_data("planner.estimator.time", "kernels.yaml")
    return {name: float(row["value"]) for name, row in raw["constants"].items()}


@cache
def device_constants(gpu: Gpu) -> dict[str, float]:
    """The constants with those that were measured on this very device (gpus.yaml, measured) in their place."""
    table = constants()
    return {**table, **{name: value for name, value in gpu.measured.items() if name in table}}


@cache
def engine_constants(gpu: Gpu) -> dict[str, float]:
    """The constants of an inference engine's fused kernels: floor and rate of those that only move data as measured on the NVIDIA GPU that
    lends its surface (kernels/streaming.yaml; other vendors keep the estimate), unless the device was measured itself."""
    surface = surface_of(gpu).surface
    measured = read_kernel_data("streaming.yaml") if gpu.vendor == "nvidia" else {}
    like = measured.get(surface, {}) if isinstance(surface, str) else {}
    return {**device_constants(gpu), **({} if gpu.measured else like)}


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """Dense FLOP/s of a compute dtype. bf16 and fp16 stand for each other (same rate where both exist; Volta and Turing have fp16 only)."""
    names = SIXTEEN_BIT if dtype in SIXTEEN_BIT else (dtype,)
    for name in (dtype, *names):
        if gpu.peak_tflops.get(name):
            return gpu.peak_tflops[name] * TERA
    raise InvalidValueError(
        f"{gpu.name} has no {dtype} tensor hardware",
        f"it has {', '.join(gpu.peak_tflops)}",
        "Choose another precision.",
    )


def matmul_flops(gpu: Gpu, dtype: str) -> float:
    """FLOP/s that no matrix product exceeds, as measured (gpus.yaml, matmul_tflops); infinite where nobody measured it. A dtype that was not
    measured is taken to reach the same share of its peak as the best that was.

    A borrowed surface holds the share of the peak that its lender reaches, which another vendor's libraries may not.
    """
    names = SIXTEEN_BIT if dtype in SIXTEEN_BIT else (dtype,)
    measured = next((gpu.matmul_tflops[name] for name in names if name in gpu.matmul_tflops), None)
    if measured is not None:
        return measured * TERA
    shares = [rate / gpu.peak_tflops[name] for name, rate in gpu.matmul_tflops.items()]
    return max(shares) * peak_flops(gpu, dtype) if shares else float("inf")


def _kernel_dtype(precision: Precision) -> str:
    """Name of the GEMM surface of a precision."""
    if precision.compute_dtype == "fp8" and precision.group_size:
        return "fp8_block"
    return precision.compute_dtype if not precision.weight_only else "bf16"


def _moe_dtype(precision: Precision) -> str:
    """Name of the grouped-GEMM surface: four-bit weights have kernels of their own."""
    if precision.weight_only and precision.bits <= 5:
        return "mxfp4" if "mxfp4" in precision.name else "int4"
    return _kernel_dtype(precision)


@dataclass(frozen=True)
class Devices:
    """Per-shard facts as columns (S, 1): FLOP/s of weights and of 16-bit work, the most of either that was measured, bytes/s, bytes per weight and per KV element.

    tile: rows of a tile of a matrix product; 1 where one's own surface was measured row by row. floor, streaming_floor: seconds of the shortest kernel; streaming_rate: bytes/s of kernels that only move data.
    scales_blocks: 1 where activations get a scale per block, which takes a kernel of its own before a product."""

    peak: FloatArray
    peak16: FloatArray
    best: FloatArray
    best16: FloatArray
    bandwidth: FloatArray
    weight_bytes: FloatArray
    activation_bytes: FloatArray
    kv_bytes: FloatArray
    dequant: FloatArray
    quantises_attention: FloatArray
    quantises_head: FloatArray
    scales_blocks: FloatArray
    borrowed: npt.NDArray[np.bool_]
    tile: FloatArray
    floor: FloatArray
    streaming_floor: FloatArray
    streaming_rate: FloatArray
    gemm: Stack
    gemm16: Stack
    prefill: Stack
    shards: tuple[Shard, ...]

    def decode(self, family: str) -> Stack:
        """Surfaces of the decode attention of one of engine_time.ATTENTION_FAMILIES."""
        keys = [
            (surface_of(s.gpu).surface, "fp8" if s.kv_dtype.bytes_per_element < 1.5 else "bf16") for s in self.shards
        ]
        return Stack.build(f"decode_attention_{family}", keys)

    def moe(self, family: str) -> Stack:
        """Grouped-GEMM surfaces of the kernels of one of engine_time.EXPERT_FAMILIES (only built for models with experts). Marlin's were
        measured with integers of four bits; it unpacks all four-bit weights at the same cost. DeepGEMM was not measured: vLLM's others stand for it."""
        if family == "marlin":
            return Stack.build("moe_vllm", [(surface_of(s.gpu).surface, "int4") for s in self.shards])
        family = "vllm" if family == "deepgemm" else family
        return Stack.build(f"moe_{family}", [(surface_of(s.gpu).surface, _moe_dtype(s.precision)) for s in self.shards])


def _column(values: Sequence[float]) -> FloatArray:
    return np.array(values, dtype=float)[:, None]


def devices(shards: Sequence[Shard]) -> Devices:
    """Facts of S shards. InvalidValueError when a GPU lacks the compute dtype of its precision."""
    names = [surface_of(s.gpu).surface for s in shards]
    penalty = constants()["weight_only_compute_efficiency"]
    return Devices(
        peak=_column([peak_flops(s.gpu, s.precision.compute_dtype) for s in shards]),
        best=_column([matmul_flops(s.gpu, s.precision.compute_dtype) for s in shards]),
        best16=_column([matmul_flops(s.gpu, "bf16") for s in shards]),
        peak16=_column([peak_flops(s.gpu, "bf16") for s in shards]),
        bandwidth=_column([s.gpu.bandwidth_gb_per_s * GB for s in shards]),
        weight_bytes=_column([s.precision.bytes_per_weight for s in shards]),
        activation_bytes=_column(
            [2.0 if s.precision.weight_only or s.precision.bits > 8 else s.precision.bytes_per_weight for s in shards]
        ),
        kv_bytes=_column([s.kv_dtype.bytes_per_element for s in shards]),
        dequant=_column([penalty if s.precision.weight_only else 1.0 for s in shards]),
        quantises_attention=_column([float(s.precision.quantises_attention) for s in shards]),
        quantises_head=_column([float(s.precision.quantises_lm_head) for s in shards]),
        scales_blocks=_column(
            [
                float(s.precision.bits <= 8 and not s.precision.weight_only and s.precision.group_size is not None)
                for s in shards
            ]
        ),
        borrowed=np.array([surface_of(s.gpu).borrowed for s in shards]),
        tile=_column([1.0 if isinstance(n, KernelFile) else constants()["tile_rows"] for n in names]),
        floor=_column([engine_constants(s.gpu)["kernel_floor_us"] * 1e-6 for s in shards]),
        streaming_floor=_column([engine_constants(s.gpu)["streaming_floor_us"] * 1e-6 for s in shards]),
        streaming_rate=_column(
            [s.gpu.bandwidth_gb_per_s * GB * engine_constants(s.gpu)["streaming_efficiency"] for s in shards]
        ),
        gemm=Stack.build("gemm", [(n, _kernel_dtype(s.precision)) for n, s in zip(names, shards, strict=True)]),
        gemm16=Stack.build("gemm", [(n, "bf16") for n in names]),
        prefill=Stack.build("prefill_attention", [(n, "bf16") for n in names]),
        shards=tuple(shards),
    )


def _column_of(value: npt.ArrayLike) -> FloatArray:
    array = np.asarray(value, dtype=float)
    return array[:, None] if array.ndim == 1 else array


def rows_in_tiles(m: FloatArray, tile: FloatArray) -> FloatArray:
    """Rows that a product of m tokens works on. Kernels work in tiles of T rows: a step of any number of tokens fills half a tile for nothing on
    average. The batches of captured graphs, up to 2 T, are whole tiles; between 2 T and 4 T the half comes in."""
    return np.asarray(m + (tile - 1) / 2 * np.clip((m - 2 * tile) / (2 * tile), 0.0, 1.0))


def gemm_s(
    dev: Devices, m: FloatArray, n: FloatArray, k: FloatArray, quantised: FloatArray | float = 1.0
) -> FloatArray:
    """Dense GEMM of m tokens (S, G) or (G,) with a weight of n x k per rank (S,).

    m counts as the rows of the tiles it fills (rows_in_tiles). flops = 2 m n k, never faster than any product measured; bytes = w n k + a m k + 2 m n; block-scaled activations are quantised first, (2 + a) m k bytes. quantised: share of shards (0/1 per shard, (S, 1)) whose weight is in the
    precision of the shard; 0 = 16 bit. Weight-only precisions read few bytes and multiply in 16 bit at `dequant` of the rate.
    """
    quantised = np.broadcast_to(np.asarray(quantised, dtype=float), dev.peak.shape)
    n_col, k_col, m = _column_of(n), _column_of(k), rows_in_tiles(np.asarray(m, dtype=float), dev.tile)

    def variant(
        peaks: tuple[FloatArray, FloatArray],
        weight: FloatArray | float,
        act: FloatArray | float,
        stack: Stack,
        rate: FloatArray | float,
    ) -> FloatArray:
        flops, (peak, best) = 2 * m * n_col * k_col / rate, peaks
        memory = (weight * n_col * k_col + act * m * k_col + 2 * m * n_col) / dev.bandwidth
        shaped = np.maximum(flops / peak, memory) / stack.efficiency(n, k, m)
        return np.maximum(np.maximum(shaped, flops / best), dev.floor)

    def low() -> FloatArray:
        product = variant((dev.peak, dev.best), dev.weight_bytes, dev.activation_bytes, dev.gemm, dev.dequant)
        return np.asarray(product + dev.scales_blocks * streaming_s(dev, m * k_col * (2.0 + dev.activation_bytes)))

    if quantised.min() >= 1:
        return low()
    plain = variant((dev.peak16, dev.best16), 2.0, 2.0, dev.gemm16, 1.0)
    return np.where(quantised > 0, low(), plain) if quantised.max() > 0 else plain


def moe_s(dev: Devices, stack: Stack, m: FloatArray, shape: MoeShape) -> FloatArray:
    """Routed experts of one layer on the busiest rank for m tokens (S, G) in the expert-parallel group.

    Distinct experts touched: touched_share, of which each rank holds 1/expert_parallel; the busiest
    rank carries `imbalance` times the mean load. flops = 6 pairs h width (gated). Efficiency: as measured for these very experts, else the
    surface over width, weight bytes touched, tokens per expert.
    """
    local = _column_of(shape.experts / shape.expert_parallel)
    width, h = _column_of(shape.width), shape.hidden
    touched = np.maximum(local * touched_share(m, shape.experts, shape.top), 1e-9)
    balance = 1 + constants()["expert_imbalance"] * (_column_of(shape.expert_parallel) > 1)
    pairs = m * shape.top / _column_of(shape.expert_parallel) * balance
    matrices = 3 if shape.gated else 2
    weight = matrices * h * width * dev.weight_bytes * np.maximum(touched, np.minimum(1.0, local))
    acts = pairs * ((h + width) * dev.activation_bytes + (2 * width + h) * 2)
    flops = 2 * matrices * pairs * h * width
    roof = np.maximum(flops / dev.peak, (weight + acts) / dev.bandwidth)
    eff = _of_this_shape(dev, stack, m, shape, stack.efficiency(width + 0 * m, weight / 1e6, pairs / touched))
    return np.asarray(np.maximum(np.maximum(roof / eff, flops / dev.best), 2 * dev.floor))


def touched_share(m: FloatArray, experts: int, top: int) -> FloatArray:
    """Share of the experts that m tokens touch: 1 - (1 - k/E)^(1 + a (m - 1)). Uniform routing has a = 1; the tokens of a batch are alike, and
    touch as many as a smaller batch would (`routing_alike`)."""
    return np.asarray(1 - (1 - top / experts) ** (1 + constants()["routing_alike"] * np.maximum(m - 1, 0.0)))


def every_expert_tokens(experts: int, top: int) -> float:
    """Tokens that touch 99 of 100 experts (the inverse of touched_share)."""
    alone = float(np.log(0.01) / np.log1p(-min(top / experts, 0.99)))
    return 1 + max(alone - 1, 0.0) / constants()["routing_alike"]


def _of_this_shape(dev: Devices, stack: Stack, m: FloatArray, shape: MoeShape, otherwise: FloatArray) -> FloatArray:
    """Efficiency (S, G) of the shards whose very experts were measured (all on every rank, gated) at m tokens, of the others as given."""
    family, found = stack.kernel.removeprefix("moe_"), otherwise.copy()
    at = np.broadcast_to(np.log2(np.maximum(m, 1.0)), otherwise.shape)
    for i, shard in enumerate(dev.shards):
        if shape.expert_parallel[i] > 1 or not shape.gated:
            continue
        key = (shape.hidden, int(shape.width[i]), shape.top, shape.experts)
        curve = expert_curve(surface_of(shard.gpu).surface, family, stack.dtypes[i], key)
        if curve is not None:
            found[i] = np.exp2(np.interp(at[i], curve.tokens, curve.efficiency))
    return found


@dataclass(frozen=True)
class MoeShape:
    """Experts of a layer as cut: width (S,) of one expert on a rank, expert_parallel (S,)."""

    experts: int
    top: int
    hidden: int
    gated: bool
    width: FloatArray
    expert_parallel: FloatArray


@dataclass(frozen=True)
class CacheShape:
    """What decode attention reads on a rank: KV heads (S,), elements per token and head, flops per cached token (S,)."""

    kv_heads: FloatArray
    elements: float
    flops_per_token: FloatArray


def decode_attention_s(
    dev: Devices, stack: Stack, sequences: FloatArray, context: float, cache: CacheShape
) -> FloatArray:
    """Attention of one new token for `sequences` (S, G) sequences over `context` tokens each. stack: whose kernels, of Devices.decode.

    bytes = sequences kv_heads context elements kv_bytes; MLA has one "head" shared by all query heads.
    """
    kv_heads, elements, flops_per_token = cache.kv_heads, cache.elements, _column_of(cache.flops_per_token)
    kv_col = _column_of(kv_heads)
    amount = sequences * kv_col * context * elements * dev.kv_bytes
    flops = sequences * context * flops_per_token
    eff = stack.efficiency(sequences * kv_col * elements / 256, np.array([context]))
    return np.asarray(np.maximum(np.maximum(amount / dev.bandwidth, flops / dev.peak16) / eff, dev.floor))


def prefill_attention_s(
    dev: Devices, tokens: float, heads: FloatArray, head_dims: float, window: float | None
) -> FloatArray:
    """Causal attention of one prompt of `tokens` tokens, (S, 1): flops = 2 heads (d_k + d_v) * pairs.

    pairs = tokens^2 / 2, or with a window w: tokens w - w^2 / 2. head_dims = d_k + d_v.
    """
    reach = tokens if window is None else min(window, tokens)
    pairs = tokens * reach - reach * reach / 2
    flops = 2 * _column_of(heads) * head_dims * pairs
    eff = dev.prefill.efficiency(np.asarray(heads, dtype=float), np.array([float(max(reach, 1))]))
    return np.asarray(np.maximum(flops / dev.peak16 / eff, dev.floor))


def streaming_s(dev: Devices, bytes_moved: FloatArray, kernels: float = 1.0) -> FloatArray:
    """Norms, rotary, activations, quantisation, sampling: bytes / (bandwidth * efficiency) + a floor for each kernel."""
    return np.asarray(bytes_moved / dev.streaming_rate + kernels * dev.streaming_floor)

"""Time of llama.cpp's CUDA kernels (ggml) for one sequence: a micro-batch of a prompt, one token. Constants: engines/ggml.yaml.

Dense decoders with softmax attention on NVIDIA GPUs with tensor cores, whole layers on each GPU, prompts in micro-batches of more than 32
tokens. What it errs by stands in the accuracy report, load kind llama-bench.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from planner.errors import InvalidValueError
from planner.estimator.time.surfaces import read_data
from planner.hardware.records import Gpu
from planner.models.spec import Attention, DenseMlp, Layer, ModelSpec
from planner.space.shard import Shard
from planner.units import GB, TERA


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = read_data("planner.engines", "ggml.yaml")
    return data


@cache
def read_ggml() -> dict[str, float]:
    """Constants by name: fitted, chosen, counted (ggml.yaml holds unit and meaning)."""
    return {
        name: float(row["value"]) for part in ("fitted", "chosen", "counted") for name, row in _data()[part].items()
    }


@dataclass(frozen=True)
class GpuRates:
    """Of one GPU: FLOP/s of fp16 products with fp16 accumulate, bytes/s of its memory, clocks/s of all its SMs together."""

    flops: float
    bandwidth: float
    clocks: float


def gpu_rates(gpu: Gpu) -> GpuRates:
    """fp16 accumulate = half the int8 rate (twice the catalog's fp16 on GeForce, the same elsewhere; fp16 where int8 is not faster);
    SM clocks = fp32 / (2 lanes); memory less error correction where that takes usable memory. InvalidValueError for other hardware."""
    lanes = _data()["lanes"].get(gpu.compute_capability)
    peaks, n = gpu.peak_tflops, read_ggml()
    if lanes is None or not peaks.get("fp16"):
        raise InvalidValueError(
            f"llama.cpp's kernels are not modelled on {gpu.name}", "NVIDIA GPUs with tensor cores are", "Choose one of those."
        )  # fmt: skip
    ecc = n["ecc_share"] if gpu.usable_gib < n["ecc_usable"] * gpu.memory_gb else 0.0
    return GpuRates(
        flops=max(peaks["fp16"], peaks.get("int8", 0.0) / 2) * TERA,
        bandwidth=gpu.bandwidth_gb_per_s * GB * (1 - ecc),
        clocks=peaks["fp32"] * TERA / (2 * lanes),
    )


def _parts(layer: Layer) -> tuple[Attention, DenseMlp]:
    """The mixer and the feed-forward of a layer that is modelled; InvalidValueError else."""
    mixer = layer.mixers[0] if len(layer.mixers) == 1 else None
    if not isinstance(mixer, Attention) or not isinstance(layer.mlp, DenseMlp):
        raise InvalidValueError(
            "llama.cpp's kernels are modelled for dense decoders with softmax attention only",
            "",
            "Choose such a model.",
        )
    return mixer, layer.mlp


def products_of(layer: Layer, hidden: int) -> list[tuple[int, int]]:
    """(n, k) of the weights of a layer, one product each: nothing is fused. n = outputs = rows, k = inputs."""
    mixer, mlp = _parts(layer)
    queries, results = mixer.heads * mixer.head_dim, mixer.heads * mixer.value_dim
    up = [(mlp.intermediate, hidden)] * (2 if mlp.gated else 1)
    keys = [(mixer.kv_heads * mixer.head_dim, hidden), (mixer.kv_heads * mixer.value_dim, hidden)]
    return [(queries, hidden), *keys, (hidden, results), *up, (hidden, mlp.intermediate)]


def matrix_s(rates: GpuRates, flops: float) -> float:
    """fp16 product of many tokens: flops / peak + flops / (operand rate x SM clocks). The two add up: tiles of a micro-batch are too
    short to hide the loads."""
    return flops / rates.flops + flops / (read_ggml()["operand_flops_per_clock"] * rates.clocks)


def _moved_bytes(layer: Layer, shard: Shard, hidden: int, tokens: float) -> float:
    """Bytes that conversions, unpacking and the small fp32 kernels of a layer move for `tokens` tokens, scores aside."""
    n, (mixer, mlp) = read_ggml(), _parts(layer)
    products = products_of(layer, hidden)
    converted = sum(rows + inputs for rows, inputs in products) * n["conversion_bytes"]
    keys = mixer.kv_heads * (mixer.head_dim + mixer.value_dim)
    small = n["hidden_bytes"] * hidden + n["activation_bytes"] * mlp.intermediate + n["key_value_bytes"] * keys
    small += n["query_bytes"] * mixer.heads * mixer.head_dim
    each = shard.precision.bytes_per_weight + n["unpacked_bytes"] if shard.precision.weight_only else 0.0
    return tokens * (converted + small) + each * sum(rows * inputs for rows, inputs in products)


def micro_batch_s(model: ModelSpec, shard: Shard, tokens: float, context: float) -> float:
    """All layers of one micro-batch of `tokens` prompt tokens over `context` tokens in the cache, its own among them.

    products (2 t n k each) + attention as two products over the whole cache (no causal skipping: 2 t c heads (d_k + d_v)) by matrix_s,
    + (moved + 24 heads t c bytes) / bandwidth: at its peak, for what the second-level cache serves makes up for what is lost.
    """
    rates, n = gpu_rates(shard.gpu), read_ggml()
    total = 0.0
    for layer, count in model.layer_groups:
        mixer, _ = _parts(layer)
        flops = 2 * tokens * sum(rows * inputs for rows, inputs in products_of(layer, model.hidden))
        flops += 2 * tokens * context * mixer.heads * (mixer.head_dim + mixer.value_dim)
        moved = _moved_bytes(layer, shard, model.hidden, tokens) + n["score_bytes"] * mixer.heads * tokens * context
        total += count * (matrix_s(rates, flops) + moved / rates.bandwidth)
    return total


def vector_s(rates: GpuRates, rows: float, inputs: float, bytes_per_weight: float) -> float:
    """Matrix-vector product of one token: two bounds that do not overlap wholly, (a^p + b^p)^(1/p), a = bytes / (share x bandwidth),
    b = bytes / (bytes per clock x SM clocks)."""
    n = read_ggml()
    memory = rows * inputs * bytes_per_weight / (n["weight_share"] * rates.bandwidth)
    through = rows * inputs * bytes_per_weight / (n["weight_bytes_per_clock"] * rates.clocks)
    return float((memory ** n["overlap"] + through ** n["overlap"]) ** (1 / n["overlap"]))


def token_s(model: ModelSpec, shard: Shard, context: float) -> float:
    """One token of one sequence over `context` cached tokens: every weight once, the cache once, kernels, and a hop for each GPU more.

    The GPUs of a layer split work one after the other, so more of them never make a token faster.
    """
    rates, n = gpu_rates(shard.gpu), read_ggml()
    weight = shard.precision.bytes_per_weight
    total = vector_s(rates, model.vocab, model.hidden, weight if shard.precision.quantises_lm_head else 2.0)
    for layer, count in model.layer_groups:
        mixer, _ = _parts(layer)
        products = products_of(layer, model.hidden)
        cache_bytes = context * mixer.kv_heads * (mixer.head_dim + mixer.value_dim) * shard.kv_dtype.bytes_per_element
        kernels = n["token_kernels"] + len(products) * (1 + n["unpack_kernels"] * shard.precision.weight_only)
        each = sum(vector_s(rates, rows, inputs, weight) for rows, inputs in products)
        each += cache_bytes / (n["cache_share"] * rates.bandwidth) + kernels * n["token_kernel_us"] * 1e-6
        total += count * each
    return total + (shard.pipeline_parallel - 1) * n["hop_us"] * 1e-6


def prompt_kernels_of(model: ModelSpec, shard: Shard) -> float:
    """Kernels launched for a micro-batch, over all GPUs."""
    n = read_ggml()
    each = n["product_kernels"] + n["unpack_kernels"] * shard.precision.weight_only
    return sum(
        count * (n["prompt_kernels"] + each * len(products_of(layer, model.hidden)))
        for layer, count in model.layer_groups
    )

"""Hand-built hardware, models and engines for the tests of the time model."""

from __future__ import annotations

from planner.engines.records import EngineSpec
from planner.hardware.records import Gpu, Link
from planner.models.precision import KvDtype, Precision
from planner.models.spec import Attention, DenseMlp, LatentAttention, Layer, ModelSpec, MoeMlp
from planner.space.shard import Shard


def gpu(name, arch, bw, bf16, fp8=None, fp4=None, fp16=None, vendor="nvidia", pcie=4):
    peaks = {k: v for k, v in {"bf16": bf16, "fp16": fp16 or bf16, "fp8": fp8, "fp4": fp4}.items() if v}
    return Gpu(name, vendor, arch, 80, 79.2, bw, peaks, 9.0, pcie, 700)


# Peaks (dense, fp32 accumulate) and bandwidths from the vendors' datasheets.
A100 = gpu("a100-sxm-80", "ampere-sm80", 2039, 312)
A100_PCIE = gpu("a100-pcie-80", "ampere-sm80", 1935, 312)
H100 = gpu("h100-sxm", "hopper-sm90", 3350, 989.4, 1979)
H200 = gpu("h200", "hopper-sm90", 4800, 989.4, 1979)
B200 = gpu("b200", "blackwell-sm100", 7700, 2250, 4500, 9000)
RTX4090 = gpu("rtx-4090", "ada-sm89", 1008, 165.2, 330.3)
L40S = gpu("l40s", "ada-sm89", 864, 362, 733)

NVLINK3 = Link("nvlink3", "nvswitch", 300, 3, 8)
NVLINK4 = Link("nvlink4", "nvswitch", 450, 3, 8)
PCIE4 = Link("pcie4", "pcie-p2p", 32, 5, 8)
PCIE4_HOST = Link("pcie4-host", "pcie-host", 32, 10, 8)
BRIDGE = Link("nvlink-bridge", "nvlink-bridge", 300, 3, 2)
XGMI = Link("xgmi", "xgmi-mesh", 448, 5, 8)
RDMA = Link("ib-400", "fabric-rdma", 50, 5, 4096)
LINKS = (NVLINK3, NVLINK4, PCIE4, PCIE4_HOST, BRIDGE, XGMI, RDMA)


def precision(name, bits, dtype, weight_only=False, overhead=0.0):
    return Precision(name, bits, overhead, None, dtype, weight_only, bits >= 16, bits >= 16, True, 0.0, "", "", True)


BF16 = precision("bf16", 16, "bf16")
FP8 = precision("fp8", 8, "fp8")
INT4 = precision("int4-awq", 4, "fp16", True, 0.25)
KV16 = KvDtype("bf16", 2.0, 0.0, "", "", True)
KV8 = KvDtype("fp8", 1.0, 0.0, "", "", True)


def dense(name, layers, hidden, heads, kv_heads, inter, vocab, head_dim=128, window=None):
    layer = Layer(
        (Attention(heads, kv_heads, head_dim, window=window, kind="sliding" if window else "full"),),
        DenseMlp(inter),
        2 * hidden,
    )
    return ModelSpec(name, name, hidden, vocab, 131072, (layer,) * layers, False, hidden)


LLAMA_70B = dense("llama-70b", 80, 8192, 64, 8, 28672, 32000)
LLAMA31_70B = dense("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256)
LLAMA_8B = dense("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256)


def moe(name, layers, hidden, heads, kv_heads, experts, top, inter, vocab):
    layer = Layer(
        (Attention(heads, kv_heads, 128),), MoeMlp(experts, top, inter, router_params=hidden * experts), 2 * hidden
    )
    return ModelSpec(name, name, hidden, vocab, 131072, (layer,) * layers, False, hidden)


MIXTRAL = moe("mixtral-8x7b", 32, 4096, 32, 8, 8, 2, 14336, 32000)
_MLA = LatentAttention(128, 1536, 512, 128, 64, 128)
DEEPSEEK = ModelSpec(
    "deepseek-v3",
    "deepseek",
    7168,
    129280,
    131072,
    (Layer((_MLA,), MoeMlp(256, 8, 2048, 2048), 14336),) * 61,
    False,
    7168,
)


def shard(gpu_=H100, precision_=BF16, tp=1, pp=1, link=NVLINK4, kv=KV16, stage_link=None, ep=1, adp=1):
    return Shard(
        gpu_, precision_, kv, tp, pp, link if tp > 1 else None, (stage_link or link) if pp > 1 else None, ep, adp
    )


def engine(name="vllm", batching="continuous", version="0.22"):
    return EngineSpec(
        name, version, ("nvidia", "amd"), 7.0, batching, True, True, True, True, "any", "", (), {}, "", True
    )


VLLM, TRT, TRANSFORMERS = engine(), engine("tensorrt_llm"), engine("transformers", "static")

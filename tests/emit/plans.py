"""Plans built by hand, for the golden files and the random sweep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.engines.records import engine
from planner.plan import (
    Cost,
    Deployment,
    MemoryUse,
    ModelSummary,
    OfferChoice,
    Plan,
    Provenance,
    Range,
    ServeSettings,
    SolverReport,
)

MODELS = {
    "8b": ModelSummary(
        "llama-3.1-8b",
        "meta-llama/Llama-3.1-8B-Instruct",
        8030261248,
        8030261248,
        32,
        4096,
        128256,
        131072,
        False,
        "llama",
        "registry",
    ),
    "70b": ModelSummary(
        "llama-3.1-70b",
        "meta-llama/Llama-3.1-70B-Instruct",
        70553706496,
        70553706496,
        80,
        8192,
        128256,
        131072,
        False,
        "llama",
        "registry",
    ),
    "qwen3-30b-a3b": ModelSummary(
        "qwen3-30b-a3b",
        "Qwen/Qwen3-30B-A3B",
        30532122624,
        3350000000,
        48,
        2048,
        151936,
        40960,
        True,
        "qwen3_moe",
        "registry",
    ),
    "32b": ModelSummary(
        "qwen2.5-32b",
        "Qwen/Qwen2.5-32B-Instruct",
        32763876352,
        32763876352,
        64,
        5120,
        152064,
        32768,
        False,
        "qwen2",
        "registry",
    ),
}


def offer(gpu: str = "h100-sxm", per: int = 8, count: int = 1, **kw: Any) -> OfferChoice:
    base = {
        "provider": "aws",
        "instance_type": "p5.48xlarge",
        "region": "us-east-1",
        "tier": "on_demand",
        "count": count,
        "gpu": gpu,
        "gpus_per_instance": per,
        "usd_per_hour": 55.04,
        "observed_at": "2026-11-01",
        "source": "test",
    }
    return OfferChoice(**(base | kw))


def owned(gpu: str, per: int, count: int = 1) -> OfferChoice:
    name = f"{per}x{gpu}"
    return offer(gpu, per, count, provider="owned", instance_type=name, region="here", tier="owned", usd_per_hour=0.0)


def plan(
    model: str = "8b",
    engine_name: str = "vllm",
    precision: str = "bf16",
    kv: str = "bf16",
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    groups: int = 1,
    offers: tuple[OfferChoice, ...] | None = None,
    seqs: int = 64,
    **serve: Any,
) -> Plan:
    offers = offers or (offer(),)
    settings = ServeSettings(
        max_num_seqs=seqs,
        max_num_batched_tokens=serve.pop("tokens", 8192),
        max_model_len=serve.pop("length", 4096),
        gpu_memory_utilization=serve.pop("share", 0.9),
        attention_data_parallel=groups,
    )
    dep = Deployment(
        engine=engine_name,
        engine_version=engine(engine_name).version,
        precision=precision,
        kv_cache_dtype=kv,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
        expert_parallel=ep,
        context_parallel=1,
        gpus=tp * pp * dp,
        offers=offers,
        serve=settings,
    )
    return Plan(
        schema_version=1,
        status="optimal",
        task="serve",
        request={"model": model},
        assumptions=(),
        warnings=(),
        model=MODELS[model],
        deployment=dep,
        memory=MemoryUse(79.1, 15.0, 50.0, 2.0, 3.0, 70.0, 9.1, 400000),
        predicted={"ttft_ms": Range(120.0, 100.0, 150.0), "tpot_ms": Range(14.0, 12.0, 17.0)},
        cost=Cost(sum(o.usd_per_hour * o.count for o in offers)),
        solver=SolverReport("OPTIMAL", 1.0, 1.0, 0.1, 10, 10),
        binding=(),
        alternatives=(),
        infeasible=None,
        provenance=Provenance("0.1.0", "2026-11-01", 28),
    )


def with_model(base: Plan, hf_id: str) -> Plan:
    return replace(base, model=replace(base.model, hf_id=hf_id))


MI300X = offer("mi300x", 8, provider="azure", instance_type="Standard_ND96isr_MI300X_v5", region="westus")
L4 = offer("l4", 1, provider="gcp", instance_type="g2-standard-8", region="us-central1")

GOLDEN = {
    "vllm-one-gpu": plan(offers=(L4,), precision="fp8", seqs=16),
    "vllm-tp4": plan("70b", tp=4, precision="fp8", kv="fp8"),
    "vllm-two-replicas": plan(tp=1, dp=2, offers=(offer("l40s", 4, instance_type="g6e.12xlarge"),)),
    "vllm-moe-two-replicas": plan(
        "qwen3-30b-a3b", tp=2, dp=2, ep=2, offers=(offer("a100-sxm-80", 8, instance_type="p4de.24xlarge", tier="spot"),)
    ),
    "vllm-pp-two-nodes": plan(
        "70b", tp=8, pp=2, offers=(offer("l4", 8, 2, instance_type="g6.48xlarge"),), precision="bf16"
    ),
    "vllm-attention-dp": plan("qwen3-30b-a3b", tp=8, ep=8, groups=4),
    "vllm-attention-dp-two-nodes": plan("qwen3-30b-a3b", tp=16, ep=16, groups=16, offers=(offer(count=2),)),
    "vllm-amd": plan("70b", tp=2, dp=4, offers=(MI300X,)),
    "vllm-owned-4090": plan("32b", tp=2, precision="int4-awq", kv="fp16", offers=(owned("rtx-4090", 2),)),
    "vllm-three-replicas-two-machines": plan(tp=4, dp=3, offers=(offer(count=2),)),
    "sglang-tp2-dp2": plan(
        "32b",
        "sglang",
        "fp8",
        "fp8",
        tp=2,
        dp=2,
        offers=(offer("h200", 8, provider="nebius", instance_type="gpu-h200-sxm", region="eu-west1"),),
    ),
    "sglang-two-nodes": plan("70b", "sglang", tp=16, offers=(offer(count=2),)),
    "tensorrt-llm-fp8": plan("70b", "tensorrt_llm", "fp8", "fp8", tp=4, dp=2),
    "tensorrt-llm-two-nodes": plan("70b", "tensorrt_llm", tp=8, pp=2, offers=(offer(count=2),)),
    "tgi-awq": plan(
        "70b", "tgi", "int4-awq", "fp16", tp=4, offers=(offer("a100-sxm-40", 8, instance_type="p4d.24xlarge"),)
    ),
    "deepspeed-tp2": plan("8b", "deepspeed_inference", tp=2, seqs=8, offers=(owned("rtx-3090", 2),)),
    "transformers-nf4": plan("32b", "transformers", "bnb-nf4", seqs=4, offers=(owned("rtx-4090", 2),), dp=2),
    "transformers-tp4": plan("8b", "transformers", "fp16", "fp16", tp=4, seqs=8, offers=(owned("t4", 4),)),
    "transformers-serve": plan(
        "8b", "transformers", "bf16", seqs=1, offers=(offer("a10g", 1, instance_type="g5.2xlarge"),)
    ),
}

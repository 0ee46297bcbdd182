"""Training plans built by hand."""

from __future__ import annotations

import random
from typing import Any

from planner.emit.train.layout import layout_of
from planner.errors import InvalidValueError
from planner.plan import (
    Cost,
    Deployment,
    MemoryUse,
    ModelSummary,
    OfferChoice,
    Plan,
    Provenance,
    Range,
    SolverReport,
    TrainSettings,
)

VERSIONS = {"deepspeed": "0.19.8", "fsdp2": "2.13.0", "torchtitan": "0.3.0", "megatron_bridge": "0.3.1"}
MODELS = {
    "8b": ModelSummary(
        "llama-3.1-8b",
        "meta-llama/Llama-3.1-8B",
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
        "meta-llama/Llama-3.1-70B",
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
    "tiny": ModelSummary("tiny", "./tiny", 200000, 200000, 4, 64, 512, 256, False, "llama", "test"),
    "30b-a3b": ModelSummary(
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
}


def offer(gpu: str = "h100-sxm", per: int = 8, count: int = 1, **kw: Any) -> OfferChoice:
    base = {
        "provider": "aws", "instance_type": "p5.48xlarge", "region": "us-east-1", "tier": "on_demand", "count": count, "gpu": gpu,
        "gpus_per_instance": per, "usd_per_hour": 55.04, "observed_at": "2026-11-01", "source": "test",
    }  # fmt: skip
    return OfferChoice(**(base | kw))


def owned(gpu: str, per: int, count: int = 1) -> OfferChoice:
    return offer(
        gpu, per, count, provider="owned", instance_type=f"{per}x{gpu}", region="here", tier="owned", usd_per_hour=0.0
    )


def plan(
    model: str = "8b", engine: str = "deepspeed", *, precision: str = "bf16", tp: int = 1, pp: int = 1, cp: int = 1, dp: int = 8, ep: int = 1,
    offers: tuple[OfferChoice, ...] | None = None, **train: Any,
) -> Plan:  # fmt: skip
    micro, accumulation = train.pop("micro", 1), train.pop("accumulation", 4)
    gpus = tp * pp * cp * dp
    if offers is None:
        offers = (offer(count=-(-gpus // 8)),) if gpus > 8 else (offer(),)
    defaults: dict[str, Any] = {
        "method": "full", "zero_stage": 3 if pp == 1 else 1, "checkpoint_interval": 1, "offload": "none", "optimizer": "adamw", "seq_len": 4096, "steps": 1000,
        "layers_per_stage": None,
    }  # fmt: skip
    if pp > 1:
        layers = MODELS[model].layers
        defaults["layers_per_stage"] = tuple(layers // pp + (i < layers % pp) for i in range(pp))
    if train.get("method", "full") != "full":
        defaults |= {"lora_rank": 16, "lora_targets": ("attention", "mlp"), "frozen_precision": "bf16"}
    if train.get("method") == "qlora":
        defaults["frozen_precision"] = "nf4"
    settings = TrainSettings(
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        global_batch_size=micro * accumulation * dp,
        **(defaults | train),
    )
    dep = Deployment(
        engine=engine, engine_version=VERSIONS[engine], precision=precision, kv_cache_dtype="none", tensor_parallel=tp, pipeline_parallel=pp,
        data_parallel=dp, expert_parallel=ep, context_parallel=cp, gpus=gpus, offers=offers, train=settings,
    )  # fmt: skip
    return Plan(
        schema_version=1, status="optimal", task="train", request={"model": model}, assumptions=(), warnings=(), model=MODELS[model], deployment=dep,
        memory=MemoryUse(79.1, 15.0, 0.0, 20.0, 3.0, 70.0, 9.1, 0, 120.0, 15.0, 17.0),
        predicted={"step_time_s": Range(2.5, 2.2, 2.9), "tokens_per_s_per_gpu": Range(6500.0, 6000.0, 7000.0)},
        cost=Cost(sum(o.usd_per_hour * o.count for o in offers), None, 100.0), solver=SolverReport("OPTIMAL", 1.0, 1.0, 0.1, 10, 10), binding=(),
        alternatives=(), infeasible=None, provenance=Provenance("0.1.0", "2026-11-01", 28),
    )  # fmt: skip


def tiny(engine: str = "deepspeed", dp: int = 2, **kw: Any) -> Plan:
    """A plan for two processes on one machine, small enough to run on a CPU."""
    base: dict[str, Any] = {
        "seq_len": 64,
        "steps": 8,
        "micro": 2,
        "accumulation": 2,
        "checkpoint_interval": 0,
        "precision": "fp32",
    }
    gpus = dp * kw.get("tp", 1) * kw.get("pp", 1) * kw.get("cp", 1)
    return plan("tiny", engine, dp=dp, **(base | {"offers": (owned("rtx-4090", gpus),)} | kw))


def random_plan(rng: random.Random) -> Plan:
    """A plan that some framework can carry out, drawn at random over all axes."""
    while True:
        made = _draw(rng)
        try:
            layout_of(made)
        except InvalidValueError:
            continue
        return made


def _draw(rng: random.Random) -> Plan:
    engine = rng.choice(list(VERSIONS))
    large = engine in ("torchtitan", "megatron_bridge")
    tp, pp = rng.choice([1, 1, 2, 4, 8]), rng.choice([1, 1, 2, 4])
    cp, ep = (rng.choice([1, 2]), rng.choice([1, 1, 2])) if large else (rng.choice([1, 1, 2]), 1)
    dp = rng.choice([1, 2, 4, 8, 16])
    model = rng.choice(["8b", "70b", "30b-a3b"])
    per = rng.choice([1, 2, 4, 8])
    gpus = tp * pp * cp * dp
    count = -(-gpus // per)
    machines = (
        owned("rtx-4090", per, count)
        if rng.random() < 0.4
        else offer(per=per, count=count, tier=rng.choice(["on_demand", "spot"]))
    )
    if gpus % count:
        return _draw(rng)
    more: dict[str, Any] = {}
    if pp > 1 and rng.random() < 0.5:
        sizes = [MODELS[model].layers // pp] * pp
        sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] + 1
        more["layers_per_stage"] = tuple(sizes)
    return plan(
        model, engine, precision=rng.choice(["bf16", "bf16", "fp16", "fp32", "fp8"]), tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, offers=(machines,),
        micro=rng.choice([1, 2, 3, 8]), accumulation=rng.choice([1, 2, 16]), method=rng.choice(["full", "full", "lora", "qlora"]),
        zero_stage=rng.randint(0, 3), checkpoint_interval=rng.choice([0, 1, 2, 4]), offload=rng.choice(["none", "none", "optimizer", "optimizer+parameters"]),
        optimizer=rng.choice(["adamw", "adamw", "adamw-bf16", "adamw-8bit", "paged-adamw-8bit", "adafactor", "muon"]), packing=rng.random() < 0.8,
        chunked_loss=rng.random() < 0.5, seq_len=rng.choice([512, 4096, 32768]), steps=rng.choice([1, 7, 5000]), **more,
    )  # fmt: skip

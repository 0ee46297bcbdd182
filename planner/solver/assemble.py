"""From a row of the study to the records of a plan: deployment, memory, predictions with ranges, cost."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from planner import __version__
from planner.clock import today
from planner.engines.formats import checkpoint_for
from planner.engines.records import EngineSpec
from planner.estimator.cost.serving import usd_per_million_output_tokens
from planner.estimator.intervals import interval
from planner.estimator.operating_point import take
from planner.hardware.records import Catalog, Offer
from planner.models.precision import UNQUANTISED
from planner.models.spec import ModelSpec
from planner.plan import (
    Cost,
    Deployment,
    MemoryUse,
    ModelSummary,
    OfferChoice,
    Provenance,
    Range,
    ServeSettings,
    plain,
)
from planner.request import ServeRequest, TrainRequest
from planner.solver.study import Study
from planner.space.hardware_classes import HardwareClass
from planner.space.shard import Shard
from planner.units import GIB, format_duration


def parts(study: Study, row: int) -> tuple[HardwareClass, Shard, EngineSpec, int]:
    """Hardware class, shard, engine and pair-row index of a row of the problem."""
    candidate = int(study.placed.candidate[row])
    shard, engine = study.space.pairs[int(study.space.candidate_pair[candidate])]
    hardware = study.space.classes[int(study.space.candidate_hardware[candidate])]
    return hardware, study.space.shards[shard], study.space.engines[engine], int(study.placed.row[row])


def offer_choice(offer: Offer, count: int) -> OfferChoice:
    """An offer as the plan shows it."""
    i, p = offer.instance, offer.price
    return OfferChoice(
        provider=i.provider,
        instance_type=i.name,
        region=p.region,
        tier=p.tier,
        count=count,
        gpu=i.gpu.name,
        gpus_per_instance=i.gpu_count,
        usd_per_hour=p.usd_per_hour,
        observed_at=p.observed_on.isoformat(),
        source=p.source,
        fabric=i.fabric.name if i.fabric else None,
        cpu_threads=i.gpu.cpu_threads,
    )


def deployment(study: Study, row: int, replicas: int, machines: dict[int, int]) -> Deployment:
    """What to start, on what. machines: count by offer position."""
    _, shard, engine, at = parts(study, row)
    settings = study.pairs.settings
    return Deployment(
        engine=engine.name,
        engine_version=engine.version,
        precision=shard.precision.name,
        kv_cache_dtype=shard.kv_dtype.name,
        tensor_parallel=shard.tensor_parallel,
        pipeline_parallel=shard.pipeline_parallel,
        data_parallel=replicas,
        expert_parallel=shard.expert_parallel,
        context_parallel=1,
        gpus=replicas * shard.gpus,
        offers=tuple(offer_choice(study.offers[o], n) for o, n in sorted(machines.items())),
        serve=ServeSettings(
            max_num_seqs=int(study.rows.max_num_seqs[at]),
            max_num_batched_tokens=settings.step_tokens(engine),
            max_model_len=settings.max_model_len,
            gpu_memory_utilization=memory_share(study, row),
            attention_data_parallel=shard.attention_data_parallel,
        ),
        checkpoint=checkpoint_to_load(study.model, engine, shard),
    )


def memory_share(study: Study, row: int) -> float:
    """The share of a GPU's memory that the engine is told to fill, 0..1: its default, or less where activations and graphs, which some
    engines leave outside that share, would not fit beside it (rounded down to 0.001)."""
    from planner.estimator.memory.rules import memory_rules

    _, _, engine, at = parts(study, row)
    rules = memory_rules(engine.constants, engine.version)
    if not rules.activation.outside_budget:
        return rules.default_share
    m = study.pairs.memory(np.array([study.rows.pair[at]], dtype=np.int64), study.rows.max_num_seqs[[at]])
    fits = float(np.asarray(m.budget_bytes / m.usable_bytes).reshape(-1)[0])
    return min(rules.default_share, int(fits * 1000) / 1000)


def checkpoint_to_load(model: ModelSpec, engine: EngineSpec, shard: Shard) -> str | None:
    """The published checkpoint for a precision that the engine does not make itself layer by layer; None = the model's own."""
    support = engine.support(shard.precision.name, shard.gpu)
    if support is None or shard.precision.name in (model.native_precision, *UNQUANTISED):
        return None
    if not support.needs_checkpoint and engine.online_load == "layer":
        return None
    found = checkpoint_for(engine.name, model.hf_id, shard.precision.name)
    return found.repo if found is not None else None


def memory_use(study: Study, row: int) -> MemoryUse:
    """Memory of the fullest GPU; the pool is what the engine gives the cache, not only what is needed."""
    _, _, _, at = parts(study, row)
    which = np.array([study.rows.pair[at]], dtype=np.int64)
    m = study.pairs.memory(which, study.rows.max_num_seqs[[at]])

    def gib(value: Any) -> float:
        return round(float(np.asarray(value).reshape(-1)[0]) / GIB, 3)

    runtime = np.asarray(m.runtime_bytes) + np.asarray(m.graphs_bytes)
    total = np.asarray(m.weights_bytes) + np.asarray(m.activation_bytes) + runtime + np.asarray(m.kv_pool_bytes)
    return MemoryUse(
        gpu_usable_gib=gib(m.usable_bytes),
        weights_gib=gib(m.weights_bytes),
        kv_cache_gib=gib(m.kv_pool_bytes),
        activations_gib=gib(m.activation_bytes),
        runtime_gib=gib(runtime),
        total_gib=gib(total),
        headroom_gib=gib(np.asarray(m.usable_bytes) - total),
        kv_cache_tokens=int(np.asarray(m.kv_pool_tokens).reshape(-1)[0]) * int(study.pairs.groups[which[0]]),
    )


def predicted(study: Study, row: int, replicas: int) -> dict[str, Range]:
    """Predictions at the planned load, each with its 80% interval. Throughput and capacity are of all replicas.

    TPOT and E2E are never below the time to read the weights once per token. At an open rate, throughput is what is asked for, so it
    can only fall short, where even the low end of the capacity does not carry the load.
    """
    from planner.estimator.time.steps import weight_read_s

    _, shard, engine, at = parts(study, row)
    r = take(study.rows, np.array([at]))
    out = float(r.output_tokens_per_s[0]) * replicas
    values = {
        "ttft_ms": float(r.ttft_p95_s[0]) * 1e3,
        "tpot_ms": float(r.tpot_s[0]) * 1e3,
        "e2e_ms": float(r.e2e_s[0]) * 1e3,
        "throughput_tokens_per_s": out,
        "tokens_per_s_per_gpu": out / (replicas * shard.gpus),
        "capacity_requests_per_s": float(r.max_rate_per_s[0]) * replicas,
    }
    ranges = {}
    for name, value in values.items():
        low, high = interval(name, shard.gpu, engine)
        ranges[name] = Range(round(value, 3), round(value * low, 3), round(value * high, 3))
    floor_ms = weight_read_s(study.model, shard) * 1e3
    for name, least in (("tpot_ms", floor_ms), ("e2e_ms", floor_ms * study.request.workload.output_tokens)):
        ranges[name] = replace(ranges[name], low=min(ranges[name].value, max(ranges[name].low, round(least, 3))))
    if study.request.workload.concurrency is None and study.request.goal != "throughput":
        carried = ranges["capacity_requests_per_s"].low * study.request.workload.output_tokens
        for name, most in (
            ("throughput_tokens_per_s", carried),
            ("tokens_per_s_per_gpu", carried / (replicas * shard.gpus)),
        ):
            value = ranges[name].value
            ranges[name] = Range(value, round(min(value, most), 3), value)
    return ranges


def close_calls(request: ServeRequest, ranges: dict[str, Range]) -> tuple[str, ...]:
    """Limits that lie inside the 80% interval of what is predicted, and a load above the low end of the capacity."""
    limits, w = request.limits, request.workload
    lines = []
    for name, label, limit in (
        ("ttft_ms", "TTFT p95", limits.ttft_s),
        ("tpot_ms", "TPOT", limits.tpot_s),
        ("e2e_ms", "E2E", limits.e2e_s),
    ):
        r = ranges[name]
        if limit is not None and r.high / 1e3 > limit:
            lines.append(
                f"The limit {label} <= {format_duration(limit)} lies inside the 80% interval"
                f" ({format_duration(r.low / 1e3)} .. {format_duration(r.high / 1e3)}): measure it before you rely on it."
            )
    low = ranges["capacity_requests_per_s"].low
    if request.goal != "throughput" and w.rate_per_s is not None and w.rate_per_s > low:
        lines.append(
            f"The load of {w.rate_per_s:g} requests/s is above the low end of the capacity, {low:.3g}: the queue may grow without end."
        )
    return tuple(lines)


def cost(study: Study, row: int, replicas: int, machines: dict[int, int]) -> Cost:
    """USD per hour of all machines, and per million output tokens at the planned load."""
    _, _, _, at = parts(study, row)
    usd = sum(study.offers[o].price.usd_per_hour * n for o, n in machines.items())
    per_million = usd_per_million_output_tokens(usd, float(study.rows.output_tokens_per_s[at]) * replicas)
    return Cost(round(usd, 6), None if per_million is None else round(per_million, 4))


def model_summary(model: ModelSpec) -> ModelSummary:
    """The model as counted."""
    return ModelSummary(
        model.name,
        model.hf_id,
        model.params_total,
        model.params_active,
        len(model.layers),
        model.hidden,
        model.vocab,
        model.max_context,
        model.is_moe,
        model.family,
        model.source,
        model.native_precision,
    )


def provenance(catalog: Catalog, offers: tuple[OfferChoice, ...]) -> Provenance:
    """Dates of what the plan rests on; the price age is that of the oldest price used (None: all owned)."""
    import datetime as dt

    dates = [dt.date.fromisoformat(o.observed_at) for o in offers if o.tier != "owned"]
    newest = catalog.newest_price
    oldest = min(dates) if dates else None
    age = None if oldest is None else (today() - oldest).days
    return Provenance(__version__, newest.isoformat() if newest else None, age, catalog.calibration)


def request_dict(request: ServeRequest | TrainRequest) -> dict[str, Any]:
    """The request as plain data."""
    tree: dict[str, Any] = plain(asdict(request))
    return tree

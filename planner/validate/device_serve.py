"""Serving on the device at hand: prefill of a prompt and a decode step of the planned batch, on one tensor-parallel rank."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np

from planner.engines.records import engine, engine_on_cpu
from planner.estimator.corrections import needed_gib, running_sequences
from planner.estimator.time.engine_steps import batch_prefill_s, decode_step_s
from planner.estimator.time.engine_time import engine_timing
from planner.estimator.time.steps import step_table
from planner.models.precision import kv_dtype, precision
from planner.models.spec import ModelSpec
from planner.plan import Deployment, Plan
from planner.request import Workload
from planner.space.shard import Shard
from planner.units import GIB
from planner.validate.device import Place, Progress, Times, at_all_layers, peak_bytes, profiled, timed_s
from planner.validate.dry import Part
from planner.validate.dry_model import DTYPES, build, build_config

OWN_MODULES = "transformers"


def predicted_serving_s(
    spec: ModelSpec, dep: Deployment, place: Place, workload: Workload, batch: int
) -> tuple[float, float]:
    """(prefill of one prompt, decode step of the batch) of one rank without its collectives, by the plan's estimator."""
    shard = Shard(place.gpu, precision(dep.precision), kv_dtype(dep.kv_cache_dtype), dep.tensor_parallel, 1, None, None)
    found = engine(dep.engine)
    if place.gpu.vendor == "cpu":
        found = engine_on_cpu(dep.engine) or found
    table, timing, zero = step_table(spec, [shard], workload), engine_timing([found]), np.zeros(1, dtype=np.int64)
    one, many = np.ones(1), np.full(1, float(batch))
    prefill = batch_prefill_s(table, timing, zero, zero, (one, float(workload.input_tokens)))
    return float(prefill[0]), float(decode_step_s(table, timing, zero, zero, many)[0])


def _times(
    place: Place, raw: dict[str, Any], dep: Deployment, layers: int, load: tuple[int, int, int], trace: Path | None
) -> Times:
    """Prefill and decode step of so many layers. load: prompt tokens, context of the decode step, sequences."""
    torch, device = place.device.torch, place.device
    prompt, context, batch = load
    config = build_config(raw, layers, dep.tensor_parallel)
    config.use_cache = True
    peaks: list[float] = []
    from transformers import DynamicCache

    with torch.no_grad(), peak_bytes(device, peaks):
        model = build(config, getattr(torch, DTYPES[dep.precision])).to(device.name).eval()
        ids = torch.zeros(1, prompt, dtype=torch.int64, device=device.name)

        def prefill() -> Any:
            return model(input_ids=ids, use_cache=True, logits_to_keep=1)

        first = timed_s(device, prefill)
        takes = inspect.signature(model.forward).parameters
        held = {
            "cache" if "cache" in takes else "past_key_values": DynamicCache(config=config)
        }  # renamed in transformers 5.24
        model(
            input_ids=torch.zeros(batch, context, dtype=torch.int64, device=device.name),
            **held,
            use_cache=True,
            logits_to_keep=1,
        )
        last = torch.zeros(batch, 1, dtype=torch.int64, device=device.name)

        def decode() -> Any:
            return model(input_ids=last, **held, use_cache=True)

        step = timed_s(device, decode)
        profiled(device, trace, decode)
    return Times(first, step, peaks[0] if peaks else None)


def serving(
    plan: Plan, raw: dict[str, Any], spec: ModelSpec, place: Place, trace: Path | None, progress: Progress
) -> tuple[list[Part], dict[str, float], list[str]]:
    """Parts, what the contract names of them, and notes."""
    dep = plan.deployment
    if dep is None:
        raise ValueError("a plan without a deployment")
    w = plan.request["workload"]
    workload = Workload(int(w["input_tokens"]), int(w["output_tokens"]), 1.0)
    batch = running_sequences(plan)
    load = (workload.input_tokens, workload.input_tokens + workload.output_tokens // 2, batch)

    def run(layers: int, last: bool) -> Times:
        return _times(place, raw, dep, layers, load, trace if last else None)

    found = at_all_layers("serving", run, len(spec.layers), progress)
    prefill, decode = found.first_s, found.second_s
    expected = predicted_serving_s(spec, dep, place, workload, batch)
    parts = [
        Part("prefill of one prompt", "ms", expected[0] * 1e3, prefill * 1e3),
        Part(f"decode step of {batch}", "ms", expected[1] * 1e3, decode * 1e3),
    ]
    notes = [
        f"Decoded were {batch} sequences at {load[1]} tokens, what one replica holds at the planned load; prompts have {load[0]} tokens."
    ]
    contract: dict[str, float] = {}
    whole = dep.engine == OWN_MODULES and dep.tensor_parallel == 1
    if whole:
        contract["tpot_ms"] = round(decode * 1e3 * plan.predicted["tpot_ms"].value / (expected[1] * 1e3), 4)
        contract["ttft_ms"] = round(prefill * 1e3 * plan.predicted["ttft_ms"].value / (expected[0] * 1e3), 4)
        notes.append("tpot_ms and ttft_ms are the plan's, scaled with what was measured: the queue is not run here.")
    else:
        notes.append(
            f"{dep.engine} has kernels and graphs of its own, which these modules are slower than; no tpot_ms is written for it."
        )
    if found.peak and whole and plan.memory is not None:
        context = plan.memory.runtime_gib if place.device.cuda else 0.0  # CUDA's own, which torch does not count
        peak, need = found.peak / GIB + context, needed_gib(plan)
        parts.append(Part("peak memory", "GiB", need, peak))
        contract["peak_memory_gib"] = round(peak, 4)
    return parts, contract, notes

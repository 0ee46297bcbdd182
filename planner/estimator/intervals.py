"""The 80% interval of each number a plan predicts: which measured class it belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from planner.engines.records import EngineSpec
from planner.estimator.corrections import correction
from planner.estimator.time.surfaces import FloatArray, surface_of
from planner.estimator.uncertainty import ranges, training_ranges
from planner.hardware.records import Gpu
from planner.request import Risk

MEASURED_AS = {
    "ttft_ms": "ttft_p99",
    "tpot_ms": "tpot",
    "e2e_ms": "e2e",
    "throughput_tokens_per_s": "throughput",
    "tokens_per_s_per_gpu": "throughput",
    "capacity_requests_per_s": "throughput",
}


def interval(metric: str, gpu: Gpu, engine: EngineSpec | str) -> tuple[float, float]:
    """(low, high) factors around a prediction, by metric, engine, and whether the GPU's kernels are its own or borrowed."""
    name = engine if isinstance(engine, str) else engine.name
    known = correction(gpu, name, "ttft_ms" if metric == "ttft_ms" else "tpot_ms")
    if known.records:
        return (known.low, known.high) if metric.endswith("_ms") else (1 / known.high, 1 / known.low)
    gpu_class = "borrowed" if surface_of(gpu).borrowed else "measured"
    return ranges(MEASURED_AS[metric], gpu_class, name)


@dataclass(frozen=True)
class Margins:
    """Factors (P,) that turn predictions of P (shard, engine) pairs into the bad end of their range: times up, capacity down."""

    ttft: FloatArray
    tpot: FloatArray
    e2e: FloatArray
    capacity: FloatArray


def margins(pairs: Iterable[tuple[Gpu, EngineSpec]]) -> Margins:
    """The bad ends of the 80% ranges: about nine in ten measured values are no worse."""
    known: dict[tuple[str, str], tuple[float, float, float, float]] = {}
    rows = []
    for gpu, engine in pairs:
        key = (gpu.name, engine.name)
        if key not in known:
            ttft, tpot, e2e = (interval(name, gpu, engine)[1] for name in ("ttft_ms", "tpot_ms", "e2e_ms"))
            known[key] = (ttft, tpot, e2e, interval("capacity_requests_per_s", gpu, engine)[0])
        rows.append(known[key])
    table = np.array(rows, dtype=float).reshape(-1, 4)
    return Margins(table[:, 0], table[:, 1], table[:, 2], table[:, 3])


def training_margins(risk: Risk, gpu: Gpu, moe: bool, framework: str) -> tuple[float, float]:
    """Factors of (time, peak memory) that a training run's limits are held against: 1, or the bad ends of the 80% ranges."""
    if risk == "high":
        return 1.0, 1.0
    known = correction(gpu, framework, "peak_memory_gib")
    memory = known.high if known.records else training_ranges("memory")[1]
    return training_interval("step_time_s", gpu, moe, framework)[1], memory


INVERSE = ("throughput_tokens_per_s", "tokens_per_s_per_gpu", "mfu")


def training_interval(metric: str, gpu: Gpu, moe: bool, framework: str = "") -> tuple[float, float]:
    """(low, high) factors of a training prediction: of the step time by model kind, inverted for rates.

    A GPU whose kernels are borrowed widens them by the spread of borrowed against measured serving times.
    """
    known = correction(gpu, framework, "step_time_s")
    low, high = (known.low, known.high) if known.records else training_ranges("time_moe" if moe else "time")
    if not known.records and surface_of(gpu).borrowed:
        near, far = ranges("tpot", "measured", ""), ranges("tpot", "borrowed", "")
        low, high = low * min(1.0, far[0] / near[0]), high * max(1.0, far[1] / near[1])
    return (1 / high, 1 / low) if metric in INVERSE else (low, high)

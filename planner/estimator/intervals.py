"""The 80% interval of each number a plan predicts: which measured class it belongs to."""

from __future__ import annotations

from planner.engines.records import EngineSpec
from planner.estimator.time.surfaces import surface_of
from planner.estimator.uncertainty import ranges
from planner.hardware.records import Gpu

MEASURED_AS = {
    "ttft_ms": "ttft_p99",
    "tpot_ms": "tpot",
    "e2e_ms": "e2e",
    "throughput_tokens_per_s": "throughput",
    "tokens_per_s_per_gpu": "throughput",
    "capacity_requests_per_s": "throughput",
    "step_time_s": "step_time",
    "total_time_h": "step_time",
    "mfu": "train_throughput",
    "train_tokens_per_s": "train_throughput",
}


def interval(metric: str, gpu: Gpu, engine: EngineSpec | str) -> tuple[float, float]:
    """(low, high) factors around a prediction of the plan; wider where the GPU's kernels are borrowed from a sibling."""
    gpu_class = "borrowed" if surface_of(gpu).borrowed else "measured"
    return ranges(MEASURED_AS[metric], gpu_class, engine if isinstance(engine, str) else engine.name)

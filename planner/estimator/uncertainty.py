"""How far off a prediction may be: factors low..high around a value that held 80% of measured rows, by class.

Data: uncertainty.yaml, made from the replay of measured serving rows on a training half and checked on the other half.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from planner.estimator.time.surfaces import read_data

RATES = ("throughput", "prefill")


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = read_data("planner.estimator", "uncertainty.yaml")
    return data


def ranges(metric: str, gpu_class: str, engine: str) -> tuple[float, float]:
    """(low_factor, high_factor): 80% of truths lie between value * low and value * high.

    metric: ttft, ttft_p95, ttft_p99, tpot, tpot_p99, e2e, throughput, prefill. gpu_class: 'measured' (kernel latencies of this very GPU)
    or 'borrowed', which is never narrower than 'measured', or 'own' (kernels with a law of their own, no surface behind it). engine: an engine's name. A class nobody measured takes the wide default and says so in the data.
    """
    low, high = _class_range(metric, gpu_class, engine)
    if gpu_class != "borrowed":
        return low, high
    near_low, near_high = _class_range(metric, "measured", engine)
    return min(low, near_low), max(high, near_high)


def _class_range(metric: str, gpu_class: str, engine: str) -> tuple[float, float]:
    """The range of one class of GPU alone."""
    table = _data()["factors"]
    metric = _data()["same_as"].get(metric, metric)
    for key in (f"{metric}/{gpu_class}/{engine}", f"{metric}/{gpu_class}", f"default/{gpu_class}"):
        if key in table:
            low, high = float(table[key]["low"]), float(table[key]["high"])
            return (1 / high, 1 / low) if table[key].get("of") == "rates" and metric not in RATES else (low, high)
    return float(table["default"]["low"]), float(table["default"]["high"])


def training_ranges(kind: str) -> tuple[float, float]:
    """(low, high) factors that held 80% of measured training rows: kind is time, time_moe or memory."""
    low, high = _data()["training"][kind]
    return float(low), float(high)


def calibration_spread(kind: str) -> tuple[float, float, float]:
    """Spreads of ln(measured / predicted) within a class and between classes, and how many records the first is worth.

    kind: time or memory. A class is one GPU and one engine or framework.
    """
    row = _data()["calibration"][kind]
    return float(row["within_ln"]), float(row["between_ln"]), float(row["worth_records"])

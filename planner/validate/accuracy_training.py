"""Replay of published training measurements: the estimators predict each row; rows are read in training_cases.py.

Only facts of the row steer a prediction; per-framework constants are in engines/training.yaml. Rows that do not state
recomputation take it only when the layout would not fit otherwise by far. Half of the (model, gpu, source) groups are
held back from any fit: half_of says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.errors import PlannerError
from planner.estimator.memory.train_reserved import ProcessMemory, process_memory
from planner.estimator.memory.training import training_memory
from planner.estimator.time.kernels import peak_flops
from planner.estimator.time.training import training_time
from planner.estimator.train_stages import layer_flops_per_token
from planner.estimator.uncertainty import training_ranges
from planner.hardware.records import Catalog
from planner.space.train_rows import TrainRows
from planner.units import GIB
from planner.validate.prediction import Prediction
from planner.validate.training_cases import (
    TIME_METRICS,
    Case,
    half_of,
    read_case,
    read_memory_case,
)
from planner.validate.training_models import SkipRowError, tables

__all__ = ["half_of", "replay", "replay_memory_training"]


def _group(cases: Sequence[tuple[int, Case]]) -> list[list[tuple[int, Case]]]:
    """Cases that one call of an estimator can take together."""
    groups: dict[Any, list[tuple[int, Case]]] = {}
    for number, case in cases:
        hw = (case.hw.gpu.name, case.hw.gpus_per_node, case.hw.fabric.name if case.hw.fabric else "")
        groups.setdefault((case.model, case.job, hw, case.framework), []).append((number, case))
    return list(groups.values())


def _settled(group: Sequence[Case]) -> list[Case]:
    """Recomputation that the source does not state is assumed only when the layout does not fit without."""
    first, rows = group[0], TrainRows.of([c.layout for c in group])
    memory = training_memory(first.model, first.job, first.hw, [first.framework], rows)
    fits = memory.peak_bytes <= memory.usable_bytes * tables()["recompute_margin"]
    return [
        c if c.recompute_stated or ok else replace(c, layout=(*c.layout[:9], 1, c.layout[10]))
        for c, ok in zip(group, fits.tolist(), strict=True)
    ]


def _flops_per_token(case: Case) -> float:
    """FLOPs of a token as the source counts them."""
    model, full = case.model, case.flops_attention == "full"
    body = 0.0
    for layer, count in model.layer_groups:
        whole, bare = (
            layer_flops_per_token(layer, model.hidden, case.job.seq_len),
            2.0 * layer.active_params(model.hidden),
        )
        body += (bare + (whole - bare) * (2.0 if full else 1.0)) * count
    head = 2.0 * model.vocab * model.hidden
    if case.job.method != "full":
        return 2 * (body + head)
    return (4 * body + 3 * head) if case.hardware_flops else 3 * (body + head)


def _time_value(case: Case, tokens_per_gpu: float, step: float, peak: float) -> float:
    if case.metric == "step_time_s":
        return step
    if case.metric == "tokens_per_s_per_gpu":
        return tokens_per_gpu
    rate = tokens_per_gpu * _flops_per_token(case)
    return rate / 1e12 if case.metric == "tflops_per_gpu" else rate / peak


def _memory_value(case: Case, process: ProcessMemory, steady: float, i: int) -> float:
    """Bytes that the row's figure counts. A reading of a run that failed ends where the GPU does."""
    kind = tables()["memory_rows"]["metrics"].get(case.metric, case.shows)
    if kind == "steady":
        return steady
    if kind != "process":
        return float((process.reserved if kind == "reserved" else process.allocated)[i])
    shown = float(process.process[i])
    return min(shown, case.hw.gpu.usable_gib * GIB) if case.failed else shown


def _predict(group: Sequence[Case]) -> list[float]:
    """Predictions of cases that share model, job, hardware and framework, each in the unit of its metric."""
    group = _settled(group)
    first, rows = group[0], TrainRows.of([c.layout for c in group])
    shared = (first.model, first.job, first.hw, [first.framework], rows)
    time = training_time(*shared, interleave=np.array([c.interleave for c in group]))
    memory, peak = training_memory(*shared), peak_flops(first.hw.gpu, first.job.precision)
    process, found = process_memory(first.model, first.job, first.framework, rows, memory), []
    for i, case in enumerate(group):
        rate = float(time.tokens_per_s_per_gpu[i])
        if case.metric in TIME_METRICS:
            found.append(_time_value(case, rate, float(time.step_time_s[i]), peak))
        elif case.metric == "tok_s_per_gpu":
            found.append(rate)
        else:
            found.append(_memory_value(case, process, float(memory.steady_bytes[i]), i) / case.memory_unit)
    return found


def range_kind(case: Case) -> str:
    """Class of the case in the training part of uncertainty.yaml: what is predicted, and whether a fact of it was assumed.

    memory_process: with the allocator's cache. memory_failed: a reading of a run that ran out of memory.
    """
    shows = tables()["memory_rows"]["metrics"].get(case.metric, case.shows)
    if case.metric in TIME_METRICS or shows == "rate":
        return "time_moe" if case.model.is_moe else "time_assumed" if case.assumed else "time"
    if case.failed:
        return "memory_failed"
    if case.assumed:
        return "memory_assumed"
    return {"steady": "memory_steady", "process": "memory_process", "reserved": "memory_process"}.get(shows, "memory")


def _interval(case: Case) -> tuple[float, float]:
    """The 80% interval of the case's class as factors on the prediction."""
    low, high = training_ranges(range_kind(case))
    return float(low), float(high)


def _replay(
    rows: Sequence[dict[str, str]], read: Callable[[dict[str, str], Catalog], Case], catalog: Catalog | None
) -> list[Prediction]:
    if catalog is None:
        from planner.hardware.catalog import load_catalog

        catalog = load_catalog()
    found, cases = [Prediction(None, None, None, "not read")] * len(rows), []
    for number, row in enumerate(rows):
        try:
            cases.append((number, read(row, catalog)))
        except (SkipRowError, PlannerError) as reason:
            found[number] = Prediction(None, None, None, str(reason))
    for group in _group(cases):
        try:
            for (number, case), value in zip(group, _predict([c for _, c in group]), strict=True):
                low, high = _interval(case)
                found[number] = Prediction(value, value * low, value * high, assumed="; ".join(case.assumed))
        except PlannerError as reason:
            for number, _ in group:
                found[number] = Prediction(None, None, None, str(reason))
    return found


def replay(rows: Sequence[dict[str, str]], catalog: Catalog | None = None) -> list[Prediction]:
    """One Prediction for each row of training_measured.csv, in order, in the unit of the row's metric."""
    return _replay(rows, read_case, catalog)


def replay_memory_training(rows: Sequence[dict[str, str]], catalog: Catalog | None = None) -> list[Prediction]:
    """One Prediction for each row of memory_measured.csv, in order and unit; rows of serving are skipped."""
    return _replay(rows, read_memory_case, catalog)

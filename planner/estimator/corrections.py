"""Predictions corrected by what was measured on the same class: one GPU, one engine or framework.

    l_i    = ln(measured_i / predicted_i)                     of n records of the class
    factor = exp(n mean(l) / (n + k)),  k = (w / b)^2         shrunk towards 1
    v      = (D w^2 + sum (l_i - mean l)^2) / (D + n - 1)     spread between configurations of one class
    80%    = exp(-+ Z sqrt(v (1 + 1 / (n + k))))              interval around the corrected value

w: spread of l between configurations of one class, b: between the means of classes, D: how many records w is worth
(uncertainty.yaml, calibration). Z = 1.2816. It is the posterior of a class's mean under a normal prior with mean 0
(Gelman et al., Bayesian Data Analysis, 2.5).

Of serving times l_i are the logarithms of f and g in TPOT = f TPOT0(f r), TTFT = g f TTFT0(f r) under a rate r (solver/measured_point.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.errors import InvalidValueError
from planner.estimator.memory.rules import memory_rules
from planner.estimator.time.surfaces import FloatArray
from planner.estimator.uncertainty import calibration_spread, training_ranges
from planner.hardware.records import Catalog, Correction, Gpu
from planner.plan import Deployment, Plan, Range
from planner.plan_check import LARGEST, short
from planner.plan_seal import EDITED, was_edited

if TYPE_CHECKING:  # training is loaded by those who train
    from planner.engines.training import Framework
    from planner.estimator.memory.training import TrainMemory
    from planner.estimator.time.training import TrainTime
    from planner.space.train_rows import TrainRows

Z80 = 1.2816
TIMES = {"serve": ("ttft_ms", "tpot_ms"), "train": ("step_time_s",)}
MEMORY = "peak_memory_gib"
_APPLIED = re.compile(r"^(\S+) on (\S+): (\S+) x ([0-9.eE+-]+) \(80%: ([0-9.eE+-]+) \.\. ([0-9.eE+-]+)\)")
FILLS = "the engine fills the share of memory that it is told to"
UNMEASURED = "nobody measured what this engine holds under load"


Solved = Callable[[Plan, Catalog, Mapping[str, float], Mapping[str, float]], dict[str, float] | None]


@dataclass(frozen=True)
class Record:
    """One measured number of a plan: on which GPU, by which engine, ln(measured / predicted), and the file it comes from."""

    gpu: str
    engine: str
    metric: str
    ratio_ln: float
    file: str


def shrunk(ratios_ln: Sequence[float], within_ln: float, between_ln: float, worth: float) -> Correction:
    """Factor and 80% interval of one class; equations in the module's docstring."""
    n, mean = len(ratios_ln), fmean(ratios_ln)
    k = (within_ln / between_ln) ** 2
    variance = (worth * within_ln**2 + sum((r - mean) ** 2 for r in ratios_ln)) / (worth + n - 1)
    half = Z80 * sqrt(variance * (1 + 1 / (n + k)))
    return Correction(exp(n * mean / (n + k)), exp(-half), exp(half), n)


def records_of(plan: Plan, file: str) -> list[Record]:
    """What a validated plan says of its class. Raises InvalidValueError when it holds no measured time or memory, or a value none can have.

    A prediction that was itself corrected (provenance.calibration) is taken back to what it was before.
    """
    validation, dep = plan.validation, plan.deployment
    if dep is None or not isinstance(validation, dict) or not isinstance(validation.get("measured"), dict):
        raise InvalidValueError(
            f"{file} holds no validation", "", "Write one with: planner validate PLAN --level device --out FILE."
        )
    if was_edited(plan):
        raise InvalidValueError(
            f"{file} corrects nothing", EDITED, "Solve again, validate that plan, and give it to --calibration."
        )
    gpu, found = dep.offers[0].gpu, []
    for metric in (*TIMES[plan.task], MEMORY):
        measured = validation["measured"].get(metric)
        predicted = _predicted(plan, metric)
        if predicted is None or measured is None:
            continue
        if not _positive(measured):
            raise InvalidValueError(
                f"{file}: validation.measured.{metric} is {short(measured)}", f"it must be a number above 0 and up to {LARGEST:g}",
                "Validate again, or mend that field.",
            )  # fmt: skip
        carried = _applied(plan, gpu, dep.engine, metric)
        before = predicted / (carried.factor if carried is not None else 1.0)
        found.append(Record(gpu, dep.engine, metric, log(float(measured) / before), file))
    if not found:
        raise InvalidValueError(
            f"{file} holds no measured time or memory",
            f"a validation of level {str(validation.get('level'))[:40]} counts other things",
            "Validate with --level device or engine.",
        )
    return found


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LARGEST  # False for nan too


def _predicted(plan: Plan, metric: str) -> float | None:
    """What the plan predicts of a metric; None where it does not, or where an engine fills a budget whatever it needs."""
    if metric == MEMORY:
        return None if _fills_a_budget(plan) else peak_gib(plan)
    found = plan.predicted.get(metric)
    return found.value if found is not None and found.value > 0 else None


def _fills_a_budget(plan: Plan) -> bool:
    """Whether this engine takes what its budget allows, whatever it needs."""
    dep = plan.deployment
    return plan.task == "serve" and dep is not None and memory_rules(dep.engine).budget != "all"


def peak_gib(plan: Plan) -> float | None:
    """GiB that a device is predicted to hold at the peak of a measured run: the whole budget, or what the load needs.

    None where the plan has no memory or, for the load, no predictions (plans written by hand).
    """
    if plan.memory is None or plan.deployment is None:
        return None
    if _fills_a_budget(plan):
        return plan.memory.total_gib
    known = plan.task == "train" or {"throughput_tokens_per_s", "tpot_ms"} <= set(plan.predicted)
    return needed_gib(plan) if known else None


def running_sequences(plan: Plan) -> int:
    """Sequences that one replica decodes at the planned load, tokens/s x TPOT / replicas (Little), from 1 to max_num_seqs."""
    dep = plan.deployment
    if dep is None or dep.serve is None:
        raise InvalidValueError("the plan serves nothing", "", "Give a serving plan.")
    tokens, tpot_ms = plan.predicted["throughput_tokens_per_s"].value, plan.predicted["tpot_ms"].value
    return max(1, min(dep.serve.max_num_seqs, round(tokens * tpot_ms / 1e3 / dep.data_parallel)))


def needed_gib(plan: Plan) -> float:
    """GiB that a run is predicted to take: the total of training; of serving what the planned load fills.

    Serving: weights + runtime + activations of the prompts of one batch (the plan has room for max_num_batched_tokens) + the cache of the
    sequences that run.
    """
    m = plan.memory
    if m is None:
        raise InvalidValueError("the plan has no memory", "it is infeasible", "Solve again.")
    if plan.task == "train":
        return m.total_gib
    w, dep, running = plan.request["workload"], plan.deployment, running_sequences(plan)
    most = dep.serve.max_num_batched_tokens if dep and dep.serve else 1
    share = min(1.0, running * float(w["input_tokens"]) / most)
    cached = running * float(w["input_tokens"] + w["output_tokens"]) / max(m.kv_cache_tokens, 1)
    return m.weights_gib + m.activations_gib * share + m.runtime_gib + cached * m.kv_cache_gib


def peak_range(plan: Plan) -> tuple[Range | float | None, str]:
    """peak_gib with its 80% interval (of the plan's own correction, else of all measured training runs), or without one and why."""
    value, dep = peak_gib(plan), plan.deployment
    if value is None or dep is None:
        return None, ""
    if _fills_a_budget(plan):
        return value, FILLS
    found = _applied(plan, dep.offers[0].gpu, dep.engine, MEMORY)
    if found is None and plan.task != "train":
        return value, UNMEASURED
    low, high = (found.low, found.high) if found is not None else training_ranges("memory")
    return Range(value, value * low, value * high), ""


def _applied(plan: Plan, gpu: str, engine: str, metric: str) -> Correction | None:
    """The correction that a prediction of the plan carries, as its provenance says; None where it carries none."""
    for line in plan.provenance.calibration:
        found = _APPLIED.match(line)
        if found and found.group(1, 2, 3) == (engine, gpu, metric):
            return Correction(float(found[4]), float(found[5]), float(found[6]), 1)
    return None


def composed(
    plan: Plan, records: Sequence[Record], catalog: Catalog, solved: Solved | None
) -> tuple[list[Record], bool]:
    """Records of which TTFT holds what is left of it once TPOT is corrected (operating_point.corrected_time), and whether they were solved.

    Solved at the plan's own load where the estimator reproduces it. Else the ratios are divided, which is the same far from saturation.
    """
    times = {r.metric: r for r in records if r.metric in TIMES["serve"]}
    if not times:
        return list(records), True
    measured = {m: float((plan.validation or {})["measured"][m]) for m in times}
    before = {m: measured[m] / exp(r.ratio_ln) for m, r in times.items()} if not plan.provenance.calibration else {}
    found = (
        solved(plan, catalog, measured, before)
        if solved is not None and times[next(iter(times))].gpu in catalog.gpus
        else None
    )
    left = found if found is not None else {m: r.ratio_ln for m, r in times.items()}
    if found is None and len(left) == len(TIMES["serve"]):
        left = {**left, "ttft_ms": left["ttft_ms"] - left["tpot_ms"]}
    return [replace(r, ratio_ln=left.get(r.metric, r.ratio_ln)) for r in records], found is not None


def corrected(catalog: Catalog, plans: Sequence[tuple[str, Plan]], solved: Solved | None = None) -> Catalog:
    """The catalog whose GPUs carry the corrections of these validated plans; Catalog.calibration says which, in words.

    solved: solver.measured_point.measured_factors; without it ratios of serving times are taken as factors.
    """
    groups: dict[tuple[str, str, str], list[Record]] = {}
    seen: set[tuple[str, str, str, float]] = set()
    plain = []
    for file, plan in plans:
        records, exact = composed(plan, records_of(plan, file), catalog, solved)
        if not exact and solved is not None and records[0].gpu in catalog.gpus:
            plain.append(
                f"{records[0].engine} on {records[0].gpu}: the load of {file} is not reproduced, its ratios are taken as factors"
            )
        for record in records:
            key = (record.gpu, record.engine, record.metric, record.ratio_ln)
            if key not in seen:  # the same plan given twice is one measurement
                seen.add(key)
                groups.setdefault(key[:3], []).append(record)
    gpus, lines = dict(catalog.gpus), plain
    for (name, engine, metric), records in groups.items():
        if name not in gpus:
            lines.append(f"{engine} on {name}: not used, this GPU is not in the catalog")
            continue
        found = shrunk([r.ratio_ln for r in records], *calibration_spread("memory" if metric == MEMORY else "time"))
        gpus[name] = replace(gpus[name], corrections={**gpus[name].corrections, f"{engine}/{metric}": found})
        lines.append(_words(engine, name, metric, found, records))
    return _with_gpus(catalog, gpus, tuple(lines))


def _words(engine: str, gpu: str, metric: str, c: Correction, records: Sequence[Record]) -> str:
    files = ", ".join(dict.fromkeys(r.file for r in records))
    return f"{engine} on {gpu}: {metric} x {c.factor:.6g} (80%: {c.low:.3g} .. {c.high:.3g}) from {c.records} measured, {files}"


def _with_gpus(catalog: Catalog, gpus: dict[str, Gpu], lines: tuple[str, ...]) -> Catalog:
    machines = {id(i): replace(i, gpu=gpus[i.gpu.name]) for i in catalog.instances}
    offers = tuple(replace(o, instance=replace(o.instance, gpu=gpus[o.instance.gpu.name])) for o in catalog.offers)
    return replace(catalog, gpus=gpus, instances=tuple(machines.values()), offers=offers, calibration=lines)


def correction(gpu: Gpu, engine: str, metric: str) -> Correction:
    """What was measured of this engine on this GPU; factor 1 and no records where nothing was."""
    return gpu.corrections.get(f"{engine}/{metric}", _NONE)


_NONE = Correction(1.0, 1.0, 1.0, 0)


CORRECTED = "corrected by measurement"


def applied_to(catalog: Catalog, deployed: Deployment) -> list[str]:
    """Lines of Catalog.calibration that correct predictions of this deployment."""
    start = f"{deployed.engine} on {deployed.offers[0].gpu}: "
    return [line for line in catalog.calibration if line.startswith(start) and _APPLIED.match(line)]


def calibration_notes(catalog: Catalog, deployed: Deployment) -> tuple[str, ...]:
    """What a plan says of its calibration: what was applied, and that other classes were left alone. () without one."""
    if not catalog.calibration:
        return ()
    gpu, engine = deployed.offers[0].gpu, deployed.engine
    mine = applied_to(catalog, deployed)
    if not mine:
        return (f"The calibration files hold nothing of {engine} on {gpu}: its predictions are as they were.",)
    notes = [f"Corrected by measurement: {line}." for line in mine]
    return (
        *notes,
        f"Predictions of anything else than {engine} on {gpu} are corrected only where the provenance says so.",
    )


MOST_UTILISATION = 0.9
"""No correction promises more of the dense peak: the bound of the training search counts on it (solver/train_study.py)."""


def _factors(gpu: Gpu, stacks: Sequence[Framework], rows: TrainRows, metric: str) -> FloatArray:
    """What measurement says of each row's framework on this GPU; 1 where nothing was measured."""
    return np.asarray(np.array([correction(gpu, stack.name, metric).factor for stack in stacks])[rows.framework])


def corrected_training_memory(
    memory: TrainMemory, gpu: Gpu, stacks: Sequence[Framework], rows: TrainRows
) -> TrainMemory:
    """The peak times what was measured; the parts stay as they were, so that the rest carries the difference."""
    if not gpu.corrections:
        return memory
    return replace(memory, peak_bytes=memory.peak_bytes * _factors(gpu, stacks, rows, MEMORY))


def corrected_training_time(time: TrainTime, gpu: Gpu, stacks: Sequence[Framework], rows: TrainRows) -> TrainTime:
    """Step time times what was measured, rates by it, never beyond MOST_UTILISATION of the peak. A floor stays a floor."""
    if not gpu.corrections:
        return time
    slower = np.maximum(_factors(gpu, stacks, rows, "step_time_s"), np.minimum(time.mfu / MOST_UTILISATION, 1.0))
    rates = {k: getattr(time, k) / slower for k in ("tokens_per_s", "tokens_per_s_per_gpu", "mfu")}
    return replace(time, step_time_s=time.step_time_s * slower, **rates)

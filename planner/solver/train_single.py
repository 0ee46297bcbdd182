"""Training: one configuration (estimate, memory), and every instance type (compare)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.errors import InvalidValueError
from planner.estimator.corrections import calibration_notes
from planner.hardware.records import Catalog
from planner.models.spec import ModelSpec
from planner.plan import on_host
from planner.request import TrainLimits, TrainRequest
from planner.solver import train_assemble, train_words
from planner.solver.compare import Choice
from planner.solver.ranking import rank
from planner.solver.single import Estimate, MemoryReport
from planner.solver.train_explain import WIDE
from planner.solver.train_study import TrainStudy, make_train_study
from planner.units import GIB


def _best_row(request: TrainRequest, model: ModelSpec, catalog: Catalog) -> tuple[TrainStudy, int]:
    """The study without limits, and its best row: the fastest that fits, else the one that lacks least memory."""
    loose = replace(request, goal="fastest", limits=TrainLimits(max_gpus=request.limits.max_gpus))
    study = make_train_study(loose, model, catalog, near_miss=WIDE)
    if not len(study.problem.rows):
        reasons = "; ".join(train_words.nothing_at_all(study))
        raise InvalidValueError(
            "no legal configuration is left", reasons, "Change a pinned axis, the job or the hardware."
        )
    ranking = rank(study.problem)
    order = ranking.order(ranking.broken_count == 0)
    if len(order):
        return study, int(order[0])
    metrics = study.problem.rows.metrics
    missing = np.maximum(metrics["vram"], 0) + np.maximum(metrics["host_ram"], 0)
    return study, int(np.argmin(missing))


def estimate_training(request: TrainRequest, model: ModelSpec, catalog: Catalog) -> Estimate:
    """All predictions for the configuration of the pins; axes left open take the fastest value that fits."""
    study, row = _best_row(request, model, catalog)
    block, i = train_assemble.at(study, row)
    deployed = train_assemble.deployment(study, row)
    metrics = study.problem.rows.metrics
    return Estimate(
        deployed,
        train_assemble.memory_use(study, row),
        bool(metrics["vram"][row] <= 0 and metrics["host_ram"][row] <= 0),
        round(float(block.memory.peak_bytes[i]) / GIB, 3),
        round(float(block.memory.usable_bytes[i]) / GIB, 3),
        train_assemble.predicted(study, row),
        train_assemble.cost(study, row),
        (*train_words.assumptions(study, row, catalog), *calibration_notes(catalog, deployed)),
        train_words.warnings(study, row, deployed.offers),
    )


MOMENTS = ("while loading", "in the backward pass", "in the optimizer step")


def memory_training(request: TrainRequest, model: ModelSpec, catalog: Catalog) -> MemoryReport:
    """Memory of the pinned training configuration, part by part, on the fullest GPU at its worst moment."""
    study, row = _best_row(request, model, catalog)
    block, i = train_assemble.at(study, row)
    m = block.memory
    peak, usable = float(m.peak_bytes[i]), float(m.usable_bytes[i])
    found = train_assemble.parts_at_peak(m, i, peak)
    parts = tuple((name.removeprefix("peak_"), round(value / GIB, 3)) for name, value in found.items())
    train = train_assemble.deployment(study, row).train
    ram = study.offers[int(study.problem.rows.hardware[row])].host_ram_gib
    host = float(m.host_ram_bytes[i]) / GIB
    notes = [
        f"The worst moment is {MOMENTS[int(m.worst_moment[i])]}; between steps {float(m.steady_bytes[i]) / GIB:.2f} GiB stay."
    ]
    later = float(m.gradients_bytes[i]) - found["peak_gradients"]
    if later > 0:
        notes.append(
            f"{later / GIB:.2f} GiB of gradients are not there at that moment; they take the place of what is then freed."
        )
    if ram is not None:
        notes.append(f"A machine has {ram:,.0f} GiB of host memory.")
    if peak > usable:
        notes.append(
            "Raise --zero-stage, set --checkpoint-interval 1, add --offload optimizer, lower --micro-batch-size, or take more GPUs."
        )
    notes.extend(model.assumptions)
    return MemoryReport(
        f"{model.hf_id or model.name} on {study.classes[block.hardware].label}: {train_words.describe(study, row)}",
        parts,
        peak <= usable and int(study.problem.rows.metrics["host_ram"][row]) <= 0,
        round(peak / GIB, 3),
        round(usable / GIB, 3),
        round(usable / GIB, 3),
        0.0,
        0,
        0.0,
        0,
        request.job.seq_len,
        tuple(notes),
        host_parts=((on_host(train), round(host, 3)),),
    )


def compare_training(
    request: TrainRequest, model: ModelSpec, catalog: Catalog, *, near_misses: bool = False
) -> list[Choice]:
    """One choice per instance type: its best machine count and layout, best first by the goal."""
    study = make_train_study(request, model, catalog, per_class=True)
    ranking = rank(study.problem)
    found: list[tuple[tuple[int, ...], Choice]] = []
    types: dict[tuple[str, str], list[int]] = {}
    for o, offer in enumerate(study.offers):
        types.setdefault((offer.instance.provider, offer.instance.name), []).append(o)
    for (provider, name), offers in types.items():
        mine = np.isin(study.problem.rows.hardware, offers)
        order = ranking.order(mine & (ranking.broken_count == 0))
        fits = bool(len(order))
        if not fits and near_misses:
            order = ranking.order(mine & (ranking.broken_count == 1))
        if not len(order):
            continue
        row = int(order[0])
        choice = Choice(
            provider,
            name,
            fits,
            train_assemble.deployment(study, row),
            train_assemble.memory_use(study, row),
            train_assemble.predicted(study, row),
            train_assemble.cost(study, row),
            "" if fits else train_words.broken(study, ranking, row),
        )
        found.append(((0 if fits else 1, *(int(k) for k in ranking.key[row])), choice))
    return [choice for _, choice in sorted(found, key=lambda pair: pair[0])]

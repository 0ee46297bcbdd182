"""Which option is to blame when a pinned axis leaves no layout at all, and why, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from planner.engines.training import Framework
from planner.request import TrainPins
from planner.solver.train_study import TrainStudy, placements
from planner.space.hardware_classes import HardwareClass
from planner.space.train_candidates import batch_range, enumerate_rows
from planner.space.train_layout import job_problem, layout_problem
from planner.space.train_rows import TrainRows

FLAGS = {
    "framework": "--framework",
    "tensor_parallel": "--tensor-parallel",
    "pipeline_parallel": "--pipeline-parallel",
    "context_parallel": "--context-parallel",
    "data_parallel": "--data-parallel",
    "expert_parallel": "--expert-parallel",
    "zero_stage": "--zero-stage",
    "micro_batch_size": "--micro-batch-size",
    "checkpoint_interval": "--checkpoint-interval",
    "offload": "--offload",
}
DEGREES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")
LOOKED_AT = 12  # machines and counts, the most promising first


def pinned(pins: TrainPins) -> dict[str, object]:
    """The axes that the user fixed, by field."""
    return {f.name: value for f in fields(TrainPins) if (value := getattr(pins, f.name)) is not None}


def pin_problems(study: TrainStudy) -> tuple[str, ...]:
    """One line for each pinned option without which there would be layouts, with the reason; empty when none is to blame."""
    pins, found = study.request.pins, []
    for name, value in pinned(pins).items():
        for hw, machines, rows in _without(study, replace(pins, **{name: None})):
            reasons = dict.fromkeys(_reasons(study, hw, machines, rows, name))
            found.append(f"{FLAGS[name]} {value}: {'; '.join([*reasons][:3])}")
            break
    together = " ".join(f"{FLAGS[name]} {value}" for name, value in pinned(pins).items())
    if len(found) > 1:  # the framework lacks what another line names
        found = [line for line in found if not line.startswith(FLAGS["framework"])]
    if not found and len(pinned(pins)) > 1 and any(True for _ in _without(study, TrainPins())):
        found.append(f"no layout has all of {together}: leave at least two of them open")
    return tuple(found)


def _without(study: TrainStudy, pins: TrainPins) -> Iterator[tuple[HardwareClass, int, TrainRows]]:
    """Machines, their number and the legal layouts there under other pins, where there are any."""
    request, model = study.request, study.model
    for _, h, machines in placements(request, model, study.classes)[:LOOKED_AT]:
        rows, _ = enumerate_rows(model, request.job, study.classes[h], machines, study.frameworks, pins)
        if len(rows):
            yield study.classes[h], machines, rows


def _reasons(study: TrainStudy, hw: HardwareClass, machines: int, rows: TrainRows, name: str) -> Iterator[str]:
    """Why layouts that would be legal are not with the pinned value, one for each framework."""
    value = getattr(study.request.pins, name)
    if name == "framework":
        problem = job_problem(study.model, study.request.job, _named(study, value), hw.gpu)
        yield problem or "it has no layout with the other options"
        return
    if name == "offload":
        yield "no framework left offloads this with the other options"
        return
    for number in dict.fromkeys(rows.framework.tolist()):
        mine = rows.take(rows.framework == number)
        framework = study.frameworks[number]
        columns = {f.name: int(getattr(mine, f.name)[0]) for f in fields(TrainRows) if f.name != "splits"}
        sample = [*(columns | {name: int(value)}).values()]
        yield (
            layout_problem(study.model, study.request.job, framework, hw, sample)
            or _count_problem(study, hw.gpus_per_node * machines, name, int(value))
            or f"{framework.label} has no layout of {hw.gpus_per_node * machines} GPUs with it"
        )


def _named(study: TrainStudy, name: str) -> Framework:
    return next(s for s in study.frameworks if s.name == name)


def _count_problem(study: TrainStudy, world: int, name: str, value: int) -> str | None:
    """What the numbers of GPUs and sequences rule out."""
    if name in DEGREES and world % value:
        return f"{world} GPUs are not divisible by {value}"
    _, most = batch_range(study.request.job)
    if name == "micro_batch_size" and value > most:
        return f"the global batch has at most {most} sequences (--global-batch)"
    return None

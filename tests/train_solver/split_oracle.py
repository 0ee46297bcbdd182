"""Exhaustive oracle of the split of layers over pipeline stages: every legal layout with every way to cut the layers.

Layouts whose checkpoints tie them to equal stages have that one way.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from planner.engines.training import frameworks
from planner.estimator.cost.training import run_steps, run_time_s
from planner.estimator.memory.training import TrainMemory, training_memory
from planner.estimator.time.training import TrainTime, training_time
from planner.hardware.catalog import load_catalog
from planner.hardware.records import Catalog
from planner.models.spec import Attention, DenseMlp, Layer, ModelSpec
from planner.request import HardwareFilter, TrainJob, TrainLimits, TrainPins, TrainRequest
from planner.solver.train_study import find_train_offers
from planner.space.hardware_classes import group_offers
from planner.space.train_candidates import enumerate_rows
from planner.space.train_rows import TrainRows
from planner.units import GIB

CATALOG = load_catalog()
CARDS = ("a100-sxm-80", "h100-sxm", "l40s")


def every_split(layers: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """All ways to cut the layers into so many stages, none of them empty."""
    cuts = itertools.combinations(range(1, layers), stages - 1)
    return tuple(tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts)


def random_split_problem(seed: int) -> tuple[TrainRequest, ModelSpec, Catalog]:
    """A small model of equal layers on a few owned GPUs whose memory is cut so that it often binds."""
    g = np.random.default_rng(seed)
    layers, hidden = int(g.integers(4, 10)), int(g.choice([1024, 2048, 4096]))
    block = Layer((Attention(16, 16, hidden // 16),), DenseMlp(4 * hidden, True), 2 * hidden)
    vocab = int(g.choice([8192, 50304, 128256]))
    model = ModelSpec("oracle", "dense", hidden, vocab, 1 << 15, (block,) * layers, bool(g.random() < 0.3), hidden)
    card, stages = str(g.choice(CARDS)), int(g.choice([2, 3, 4]))
    pins = TrainPins(
        framework=str(g.choice(["megatron_bridge", "deepspeed"])),
        pipeline_parallel=stages if g.random() < 0.7 else None,
        tensor_parallel=1 if g.random() < 0.7 else None,
        micro_batch_size=int(g.choice([1, 2, 4])),
        checkpoint_interval=int(g.choice([0, 1, 2])) if g.random() < 0.6 else None,
    )
    job = TrainJob(tokens=1e8, seq_len=int(g.choice([1024, 4096])), batch_tokens_low=2**14, batch_tokens_high=2**18)
    owned = HardwareFilter(owned=f"{stages * int(g.integers(1, 3))}x{card}")
    request = TrainRequest("oracle", "fastest", job, TrainLimits(), owned, pins)
    rows, memory, timing = formula_rows(request, model, CATALOG)
    if len(rows):
        gib = memory.peak_bytes / GIB
        cut = float(gib.min()) * float(g.uniform(0.85, 1.1)) + float(gib.max() - gib.min()) * float(g.uniform(0, 0.5))
        gpus = {**CATALOG.gpus, card: replace(CATALOG.gpus[card], usable_gib=cut)}
        slow = float(timing.step_time_s.min()) * float(g.uniform(0.9, 1.6))
        limits = TrainLimits(step_s=slow if g.random() < 0.2 else None)
        return replace(request, limits=limits), model, replace(CATALOG, gpus=gpus)
    return request, model, CATALOG


def formula_rows(request: TrainRequest, model: ModelSpec, catalog: Catalog) -> tuple[TrainRows, TrainMemory, TrainTime]:
    """All legal layouts with the split that a formula would take."""
    classes, _ = group_offers(find_train_offers(request, catalog))
    stacks = tuple(frameworks().values())
    rows, _ = enumerate_rows(model, request.job, classes[0], 1, stacks, request.pins)
    shared = (model, request.job, classes[0], stacks, rows)
    return rows, training_memory(*shared), training_time(*shared)


def shortest_run_s(request: TrainRequest, model: ModelSpec, catalog: Catalog) -> float | None:
    """Seconds of the fastest run over everything, None when nothing fits."""
    (hw,), _ = group_offers(find_train_offers(request, catalog))
    stacks = tuple(frameworks().values())
    rows, _ = enumerate_rows(model, request.job, hw, 1, stacks, request.pins)
    best = None
    free = rows.take(rows.split == 0)
    for stages in (0, *np.unique(free.pipeline_parallel).tolist()):
        cut = rows.take(rows.split > 0)
        if stages:
            mine = free.take(free.pipeline_parallel == stages)
            splits = every_split(len(model.layers), stages)
            cut = mine.take(np.repeat(np.arange(len(mine)), len(splits)))
            cut = cut.cut(splits, np.tile(np.arange(len(splits)), len(mine)))
        memory = training_memory(model, request.job, hw, stacks, cut)
        timing = training_time(model, request.job, hw, stacks, cut)
        batch = cut.micro_batch_size * cut.data_parallel * cut.gradient_accumulation_steps
        run_s = run_time_s(run_steps(request.job, batch), timing.step_time_s)
        good = memory.fits & (timing.step_time_s <= (request.limits.step_s or np.inf))
        if good.any():
            best = min(best or np.inf, float(run_s[good].min()))
    return best


def best_formula_s(request: TrainRequest, model: ModelSpec, catalog: Catalog) -> float | None:
    """Seconds of the fastest run with the split that a formula takes, None when nothing fits."""
    rows, memory, timing = formula_rows(request, model, catalog)
    good = memory.fits & (timing.step_time_s <= (request.limits.step_s or np.inf))
    batch = rows.micro_batch_size * rows.data_parallel * rows.gradient_accumulation_steps
    run_s = run_time_s(run_steps(request.job, batch), timing.step_time_s)
    return float(run_s[good].min()) if good.any() else None

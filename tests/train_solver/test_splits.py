"""How many layers each pipeline stage gets: the solver's answer is that of trying every split, and beats the formula."""

from __future__ import annotations

import json

import numpy as np
import pytest

from planner.emit import render
from planner.engines.training import frameworks
from planner.estimator.memory.training import training_memory
from planner.estimator.train_stages import split_layers
from planner.hardware.catalog import load_catalog
from planner.models import load_model
from planner.plan import stage_words
from planner.report.training import configuration
from planner.request import HardwareFilter, TrainJob, TrainPins, TrainRequest
from planner.solver.train_splits import caps_of, least_memory
from planner.solver.train_study import find_train_offers
from planner.solver.training import solve_training
from planner.space.hardware_classes import group_offers
from planner.space.train_rows import TrainRows
from tests.train_solver.split_oracle import best_formula_s, every_split, random_split_problem, shortest_run_s

PROBLEMS = 500


@pytest.mark.parametrize("block", range(10))
def test_solver_equals_every_split(block: int) -> None:
    feasible = better = 0
    for seed in range(block * PROBLEMS // 10, (block + 1) * PROBLEMS // 10):
        request, model, catalog = random_split_problem(seed)
        want, formula = shortest_run_s(request, model, catalog), best_formula_s(request, model, catalog)
        plan = solve_training(request, model, catalog)
        if want is None:
            assert plan.status == "infeasible", seed
            continue
        assert plan.status == "optimal", seed
        assert plan.deployment is not None
        assert plan.deployment.train is not None
        assert plan.predicted["total_time_h"].value * 3600 == pytest.approx(want, rel=1e-5), seed
        assert plan.memory is not None
        assert plan.memory.total_gib <= plan.memory.gpu_usable_gib + 1e-3
        sizes = plan.deployment.train.layers_per_stage
        assert sizes is None or (sum(sizes) == len(model.layers) and min(sizes) >= 1)
        feasible += 1
        better += formula is None or want < formula * (1 - 1e-6)
    assert feasible >= 20
    assert better >= 1


def test_the_solver_fits_what_the_formula_cannot() -> None:
    """Two stages of Llama 70B on 8 B200: the formula's 41 + 39 layers overflow the first GPU, which keeps two micro-batches
    in flight; the solver's 39 + 41 fit, as the last stage keeps one."""
    request = TrainRequest(
        "70b",
        goal="fastest",
        job=TrainJob(tokens=1e9, seq_len=4096),
        hardware=HardwareFilter(owned="8xb200"),
        pins=TrainPins(framework="megatron_bridge"),
    )
    model, catalog = load_model("70b"), load_catalog()
    plan = solve_training(request, model, catalog)
    assert plan.deployment is not None
    d, t = plan.deployment, plan.deployment.train
    assert t is not None
    assert (d.tensor_parallel, d.pipeline_parallel, t.layers_per_stage) == (4, 2, (39, 41))
    classes, _ = group_offers(find_train_offers(request, catalog))
    stacks = tuple(frameworks().values())
    row = (list(frameworks()).index(d.engine), 4, 2, 1, 1, 1, t.zero_stage, t.micro_batch_size)
    row = (*row, t.gradient_accumulation_steps, t.checkpoint_interval, 0)
    formula = training_memory(model, request.job, classes[0], stacks, TrainRows.of([row]))
    decided = TrainRows.of([row]).cut(((39, 41),), np.zeros(1, dtype=np.int64))
    assert split_layers(model, 4096, 2, True) == (41, 39)
    assert not formula.fits[0]
    assert training_memory(model, request.job, classes[0], stacks, decided).fits[0]
    assert "PP 2 (39, 41 layers)" in configuration(d)
    written = json.loads(render(plan)["train_settings.json"])["megatron"]["model"]["pipeline_model_parallel_layout"]
    assert written == [["embedding", *["decoder"] * 39], [*["decoder"] * 41, "loss"]]


def test_stages_in_words() -> None:
    assert stage_words((11, 12, 12, 7)) == "11, 2x 12, 7 layers"
    assert stage_words((8, 8)) == ""
    assert stage_words(None) == ""


@pytest.mark.parametrize(("layers", "stages"), [(6, 2), (7, 3), (9, 4), (12, 3)])
def test_least_memory_within_caps_is_least(layers: int, stages: int) -> None:
    rng = np.random.default_rng(layers * stages)
    for _ in range(20):
        table = np.cumsum(rng.uniform(0.5, 3.0, (stages, layers)), axis=1) + rng.uniform(0, 4, (stages, 1))
        caps = rng.integers(1, layers + 1, (5, stages))
        found = least_memory(table, caps, layers)
        every = np.array(every_split(layers, stages))
        peaks = np.take_along_axis(table[None], every[:, :, None] - 1, axis=2)[:, :, 0].max(1)
        feasible = [c for c in caps if c.sum() >= layers]
        assert len(found) == len(feasible)
        for sizes, cap in zip(found, feasible, strict=True):
            assert sizes.sum() == layers
            assert (sizes <= cap).all()
            peak = table[np.arange(stages), sizes - 1].max()
            assert peak == pytest.approx(peaks[(every <= cap).all(1)].min())


def test_caps_hold_every_layer() -> None:
    caps = caps_of(32, 4, 1.5, 2.4, 14)
    assert (caps.sum(1) >= 32).all()
    assert caps.min() >= 1
    assert len(np.unique(caps, axis=0)) == len(caps)

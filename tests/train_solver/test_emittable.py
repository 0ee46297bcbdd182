"""Whatever the training solver may choose, the launch files can be written: random rows of random jobs."""

from dataclasses import replace

import numpy as np
import pytest

from planner.emit import render
from planner.hardware.catalog import load_catalog
from planner.models import load_model
from planner.plan import Plan, SolverReport
from planner.request import METHODS, OPTIMIZERS, HardwareFilter, TrainJob, TrainPins, TrainRequest
from planner.solver import train_assemble
from planner.solver.assemble import model_summary, provenance, request_dict
from planner.solver.train_study import make_train_study

CATALOG = load_catalog()


def plans(request, model, rng, count):
    """Plans of some rows of the table of a request, good or bad."""
    study = make_train_study(request, model, CATALOG, near_miss=1e9)
    rows = len(study.problem.rows)
    for row in rng.choice(rows, min(rows, count), replace=False) if rows else ():
        d = train_assemble.deployment(study, int(row))
        yield Plan(
            1, "optimal", "train", request_dict(request), (), (), model_summary(model), d,
            train_assemble.memory_use(study, int(row)), train_assemble.predicted(study, int(row)), train_assemble.cost(study, int(row)),
            SolverReport("OPTIMAL", 1, 1, 0, 1, 1), (), (), None, provenance(CATALOG, d.offers),
        )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_every_choice_can_be_written(name, method):
    model, rng, written = load_model(name), np.random.default_rng(0), 0
    for optimizer in OPTIMIZERS:
        for packing, chunked in ((True, False), (False, True)):
            job = TrainJob(
                method=method, tokens=1e8, seq_len=8192, optimizer=optimizer, packing=packing, chunked_loss=chunked
            )
            machines = HardwareFilter(owned="2x8xh100-sxm", fabric_gbps=3200)
            asked = TrainRequest(name, goal="fastest", job=job, hardware=machines)
            pinned = (
                replace(asked, pins=TrainPins(tensor_parallel=2)),
                replace(asked, pins=TrainPins(pipeline_parallel=2)),
            )
            for request in (asked, *pinned):
                for plan in plans(request, model, rng, 3):
                    assert render(plan)["launch.sh"].startswith("#!")
                    written += 1
    assert written >= 20

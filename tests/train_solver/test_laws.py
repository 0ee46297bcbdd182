"""Laws of training plans, on the real estimators over a few offers."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import planner
from planner.errors import InvalidValueError
from planner.hardware.catalog import load_catalog
from planner.models import load_model
from planner.request import HardwareFilter, TrainJob, TrainLimits, TrainPins, TrainRequest
from planner.solver.ranking import rank
from planner.solver.train_study import make_train_study
from planner.solver.training import solve_training


@pytest.fixture(scope="module")
def catalog():
    whole = load_catalog()
    kept = {"a100-sxm-80", "h100-sxm", "rtx-4090"}
    offers = tuple(
        o
        for o in whole.offers
        if o.instance.gpu.name in kept and o.price.tier == "on_demand" and o.instance.provider in ("lambda", "aws")
    )
    return replace(whole, offers=offers)


@pytest.fixture(scope="module")
def model():
    return load_model("llama-3.1-8b")


def request(**limits):
    job = TrainJob(tokens=1e9, seq_len=4096, batch_tokens_low=2**18, batch_tokens_high=2**20)
    return TrainRequest("llama-3.1-8b", job=job, limits=TrainLimits(**limits))


def test_a_looser_deadline_never_costs_more(catalog, model):
    costs = []
    for hours in (2, 6, 24, None):
        plan = solve_training(request(deadline_s=None if hours is None else hours * 3600.0), model, catalog)
        costs.append(plan.cost.usd_total if plan.cost else np.inf)
        if plan.cost and hours:
            assert plan.predicted["total_time_h"].value <= hours
    assert costs == sorted(costs, reverse=True)


def test_more_budget_is_never_slower(catalog, model):
    times = []
    for usd in (150.0, 400.0, 1000.0):
        plan = solve_training(replace(request(budget_usd=usd), goal="fastest"), model, catalog)
        assert plan.cost.usd_total <= usd
        times.append(plan.predicted["total_time_h"].value)
    assert all(later <= earlier * 1.011 for earlier, later in pairwise(times))


def test_the_bound_prunes_nothing_that_could_win(catalog, model):
    asked = request(deadline_s=24 * 3600.0)
    plan = solve_training(asked, model, catalog)
    everything = make_train_study(asked, model, catalog, per_class=True)
    ranking = rank(everything.problem)
    best = ranking.order(ranking.broken_count == 0)[0]
    assert plan.cost.usd_total == pytest.approx(ranking.cost[best] / 1e6, abs=0.01)


def test_the_batch_adds_up(catalog, model):
    plan = solve_training(request(), model, catalog)
    d, t = plan.deployment, plan.deployment.train
    assert t.micro_batch_size * t.gradient_accumulation_steps * d.data_parallel == t.global_batch_size
    assert d.gpus == d.tensor_parallel * d.pipeline_parallel * d.context_parallel * d.data_parallel
    assert 2**18 <= t.global_batch_size * t.seq_len <= 2**20
    assert t.steps * t.global_batch_size * t.seq_len >= 1e9
    assert plan.memory.total_gib <= plan.memory.gpu_usable_gib


def test_owned_machines_and_pins_are_kept(model):
    asked = TrainRequest(
        "llama-3.1-8b",
        job=TrainJob(tokens=1e8, seq_len=2048),
        hardware=HardwareFilter(owned="8xa100-sxm-80"),
        pins=TrainPins(framework="deepspeed", zero_stage=3, checkpoint_interval=1),
    )
    plan = solve_training(asked, model, load_catalog())
    assert (plan.deployment.engine, plan.deployment.train.zero_stage) == ("deepspeed", 3)
    assert plan.deployment.train.checkpoint_interval == 1
    assert plan.deployment.offers[0].tier == "owned"


def test_an_infeasible_run_names_a_change_that_works(catalog, model):
    plan = solve_training(request(budget_usd=5.0), model, catalog)
    assert plan.status == "infeasible"
    change = next(r for r in plan.infeasible.relaxations if "budget" in r.limit)
    assert solve_training(request(budget_usd=change.needed), model, catalog).status == "optimal"
    assert solve_training(request(budget_usd=change.needed - 0.02), model, catalog).status == "infeasible"


def test_a_partial_explanation_says_so(catalog, model, monkeypatch):
    monkeypatch.setattr("planner.solver.train_explain.EXPLAIN_S", 1e-9)
    plan = solve_training(request(budget_usd=5.0), model, catalog)
    assert plan.status == "infeasible"
    assert any("its explanation is partial" in line for line in plan.assumptions)


def test_the_whole_explanation_says_nothing_of_time(catalog, model):
    plan = solve_training(request(budget_usd=5.0), model, catalog)
    assert not any("partial" in line for line in plan.assumptions)


def test_years_are_ranked_as_years():
    """100B tokens take a small card six years: its cost must not be that of a capped run."""
    where = HardwareFilter(gpus=("rtx-3090", "h100-sxm"), providers=("runpod", "lambda"))
    few, many = (
        planner.solve(TrainRequest("llama-3.1-8b", job=TrainJob(tokens=tokens), hardware=where))
        for tokens in (1e9, 1e11)
    )
    assert few.deployment.offers[0].gpu == many.deployment.offers[0].gpu
    assert many.cost.usd_total == pytest.approx(100 * few.cost.usd_total, rel=0.02)


def test_a_run_of_over_ten_years_is_no_answer():
    request = TrainRequest(
        "llama-3.1-8b",
        job=TrainJob(tokens=1.5e13),
        limits=TrainLimits(deadline_s=3000 * 3600.0),
        hardware=HardwareFilter(owned="1xrtx-3090"),
    )
    plan = planner.solve(request)
    assert plan.status == "infeasible"
    assert any("over ten years" in line for line in plan.infeasible.core)


@pytest.mark.parametrize("more", [{"tokens": 1e25}, {"batch_tokens_high": 1e20}])
def test_absurd_numbers_are_refused(more):
    with pytest.raises(InvalidValueError, match="no run has more"):
        TrainJob(**more)


def test_a_deadline_inside_the_range_is_named():
    where = HardwareFilter(gpus=("h100-sxm",), providers=("runpod", "lambda"))
    free = planner.solve(TrainRequest("llama-3.1-8b", job=TrainJob(tokens=1e9), hardware=where))
    hours = free.predicted["total_time_h"].value
    close, wide = (
        planner.solve(
            TrainRequest(
                "llama-3.1-8b",
                job=TrainJob(tokens=1e9),
                hardware=where,
                limits=TrainLimits(deadline_s=hours * 3600 * f),
            )
        )
        for f in (1.01, 3.0)
    )
    assert any("deadline" in w and "80% interval" in w for w in close.warnings)
    assert not any("deadline of" in w for w in wide.warnings)

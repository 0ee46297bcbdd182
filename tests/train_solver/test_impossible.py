"""Training requests that cannot be: the clash and the smallest change are named, and whether that is proved."""

from __future__ import annotations

import time

import planner
from planner.request import HardwareFilter, TrainJob, TrainLimits, TrainRequest


def infeasible(limits, tokens=1e9, **more):
    plan = planner.solve(TrainRequest("8b", job=TrainJob(tokens=tokens), limits=limits, **more))
    assert plan.status == "infeasible"
    assert plan.infeasible is not None
    return plan


def test_a_deadline_beyond_every_bound_is_proved_at_once():
    """Over the whole catalog: no run at the peak of all its GPUs is that fast, so that nothing is estimated before the answer."""
    start = time.perf_counter()
    plan = infeasible(TrainLimits(deadline_s=1.0))
    assert time.perf_counter() - start < 25
    assert plan.solver.status == "INFEASIBLE"
    assert [line.split(":")[0] for line in plan.infeasible.core] == ["--deadline"]
    (change,) = plan.infeasible.relaxations
    assert change.limit == "--deadline"
    hours = float(change.needed)
    eased = TrainRequest("8b", goal="fastest", job=TrainJob(tokens=1e9), limits=TrainLimits(deadline_s=hours * 3600))
    assert planner.solve(eased).deployment is not None, "the change does help"


def test_a_budget_beyond_every_bound_names_itself():
    plan = infeasible(TrainLimits(budget_usd=0.5), goal="fastest", hardware=HardwareFilter(gpus=("h100-sxm",)))
    assert [line.split(":")[0] for line in plan.infeasible.core] == ["--budget (whole run)"]
    (change,) = plan.infeasible.relaxations
    eased = TrainLimits(budget_usd=float(change.needed))
    again = TrainRequest("8b", job=TrainJob(tokens=1e9), limits=eased, hardware=HardwareFilter(gpus=("h100-sxm",)))
    assert planner.solve(again).deployment is not None


def test_more_tokens_than_ten_years_hold():
    hardware = HardwareFilter(owned="8xh100-sxm")
    plan = infeasible(TrainLimits(), tokens=1e18, hardware=hardware)
    (reason,) = plan.infeasible.core
    assert reason.startswith("--tokens: 1e+18 tokens take at least")
    (change,) = plan.infeasible.relaxations
    job = TrainJob(tokens=float(change.needed))
    assert planner.solve(TrainRequest("8b", job=job, hardware=hardware)).deployment is not None
    assert not infeasible(TrainLimits(deadline_s=1.0), tokens=1e18, hardware=hardware).infeasible.relaxations


def test_what_the_bounds_prove_is_named_without_time():
    plan = infeasible(TrainLimits(budget_usd=0.01), tokens=1e8, goal="fastest", time_limit_s=0.01)
    assert plan.solver.status == "INFEASIBLE"
    assert [line.split(":")[0] for line in plan.infeasible.core] == ["--budget (whole run)"]


def test_time_that_ran_out_is_no_proof(capsys):
    plan = infeasible(TrainLimits(deadline_s=1200.0, budget_usd=5.0), tokens=1e8, goal="fastest", time_limit_s=0.01)
    assert plan.solver.status == "UNKNOWN"
    assert plan.infeasible.core
    assert plan.assumptions[0].startswith("NOT PROVED that there is no plan: the search stopped after 10.0 ms")
    from planner.report.console import show_plan

    show_plan(plan, json=False, written=())
    shown = capsys.readouterr().out
    assert "the time ended before a proof" in shown
    assert "No plan keeps all limits" not in shown

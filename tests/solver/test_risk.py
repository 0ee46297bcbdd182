"""--risk low: limits are held against the bad end of each range, and the answer never gets better for it."""

import pytest

from planner import solve
from planner.errors import UnknownNameError
from planner.estimator.uncertainty import training_ranges
from planner.request import HardwareFilter, Limits, ServeRequest, TrainJob, TrainLimits, TrainRequest, Workload

PROBLEMS = [
    ({"ttft_s": 0.3}, {"gpus": ("h100-sxm", "h200", "b200")}),
    ({"ttft_s": 2.0, "tpot_s": 0.04}, {"gpus": ("l40s", "a100-sxm-80")}),
    ({"e2e_s": 8.0}, {"gpus": ("rtx-4090", "l40s", "h100-sxm")}),
]


def answer(limits, hardware, risk, **more):
    return solve(
        ServeRequest("llama-3.1-8b", limits=Limits(**limits), hardware=HardwareFilter(**hardware), risk=risk, **more)
    )


@pytest.mark.parametrize(("limits", "hardware"), PROBLEMS)
def test_low_risk_keeps_every_limit_at_the_bad_end_and_is_never_cheaper(limits, hardware):
    high, low = (answer(limits, hardware, risk) for risk in ("high", "low"))
    assert low.cost.usd_per_hour >= high.cost.usd_per_hour - 1e-9
    for name, limit in limits.items():
        metric = name.replace("_s", "_ms")
        assert high.predicted[metric].value <= limit * 1e3 * (1 + 1e-6)
        assert low.predicted[metric].high <= limit * 1e3 * (1 + 1e-3)
    assert not any("lies inside the 80% interval" in w for w in low.warnings)
    assert any(a.startswith("--risk low") for a in low.assumptions)


def test_low_risk_carries_the_load_at_the_low_end_of_the_capacity():
    work = Workload(rate_per_s=60.0)
    high, low = (answer({}, {"gpus": ("l40s",)}, risk, workload=work) for risk in ("high", "low"))
    assert low.predicted["capacity_requests_per_s"].low >= 60.0
    assert low.deployment.gpus > high.deployment.gpus


def test_low_risk_explains_in_the_same_measure():
    plan = answer({"ttft_s": 0.02}, {"gpus": ("l40s",)}, "low")
    assert plan.status == "infeasible"
    (relaxation,) = plan.infeasible.relaxations
    assert relaxation.unit == "ms"
    eased = float(relaxation.needed) / 1e3
    mended = answer({"ttft_s": eased}, {"gpus": ("l40s",)}, "low")
    assert mended.status == "optimal"


TRAIN = TrainJob(tokens=2e7, seq_len=2048)


def run(risk, goal="cheapest", **limits):
    where = HardwareFilter(gpus=("l40s", "a100-sxm-80", "h100-sxm"), providers=("lambda", "runpod", "crusoe"))
    return solve(TrainRequest("llama-3.2-3b", goal, TRAIN, TrainLimits(**limits), where, risk=risk))


def test_low_risk_training_keeps_time_money_and_memory_at_the_bad_end():
    free = run("high")
    hours, usd = free.predicted["total_time_h"].value, free.cost.usd_total
    deadline, budget = hours * 3600 * 1.02, usd * 1.4
    low = run("low", deadline_s=deadline, budget_usd=budget)
    assert low.status == "optimal"
    assert low.predicted["total_time_h"].high * 3600 <= deadline * 1.001
    assert (
        low.cost.usd_total * low.predicted["total_time_h"].high / low.predicted["total_time_h"].value <= budget * 1.001
    )
    assert low.memory.total_gib * training_ranges("memory")[1] <= low.memory.gpu_usable_gib * 1.001
    assert low.cost.usd_total >= usd - 1e-6
    assert any(a.startswith("--risk low") for a in low.assumptions)


def test_low_risk_training_says_what_its_prediction_is_not_the_bad_end():
    high, low = run("high"), run("low")
    for plan in (high, low):
        steps = plan.deployment.train.steps
        assert plan.predicted["total_time_h"].value * 3600 == pytest.approx(
            plan.predicted["step_time_s"].value * steps, rel=0.01
        )
        hourly = plan.cost.usd_per_hour
        assert plan.cost.usd_total == pytest.approx(hourly * plan.predicted["total_time_h"].value, rel=0.01)


def test_a_risk_nobody_knows_is_refused():
    with pytest.raises(UnknownNameError, match="risk"):
        ServeRequest("llama-3.1-8b", risk="lo")

"""`solve --validate dry`: what the check refuses gives way to the next best, and the plan says so."""

from dataclasses import replace

import pytest

from planner import api
from planner.cli.main import run
from planner.errors import InvalidValueError, NoPlanError
from planner.plan import load_plan
from planner.request import HardwareFilter, ServeRequest, TrainJob, TrainRequest
from planner.validate import checked as module
from planner.validate.dry import DryRun, Part

SERVE = ServeRequest("8b", hardware=HardwareFilter(gpus=("l40s", "h100-sxm", "a10g")))
TRAIN = TrainRequest(
    "llama-3.2-1b", job=TrainJob(tokens=1e8, seq_len=2048), hardware=HardwareFilter(gpus=("l40s", "a10g"))
)


def counting(monkeypatch, over_gib):
    """dry_run finds over_gib(n) more than planned in its n-th call."""
    seen = []

    def dry_run(plan):
        seen.append(plan.deployment)
        more, m = over_gib(len(seen)), plan.memory
        if plan.deployment.train is not None:
            return DryRun((Part("tensors at the peak", "GiB", 10.0, 10.0 + more),), (), {})
        return DryRun(
            (Part("weights", "GiB", m.weights_gib, m.weights_gib + more), Part("KV cache", "GiB", 1.0, 1.0)), (), {}
        )

    monkeypatch.setattr(module, "dry_run", dry_run)
    return seen


def quiet(*_):
    pass


@pytest.mark.parametrize("request_", [SERVE, TRAIN], ids=["serve", "train"])
def test_the_next_best_is_taken_and_named(request_, monkeypatch):
    seen = counting(monkeypatch, lambda n: 500.0 if n < 3 else -0.5)
    best = api.solve(request_)
    plan = module.checked(lambda excluded: api.solve(request_, excluded=excluded), quiet)
    assert seen[0] == best.deployment
    assert plan.deployment == seen[2]
    assert len(set(seen)) == 3
    assert plan.status == "optimal"
    costs = [best.solver.objective, plan.solver.objective]
    assert costs == sorted(costs)
    refused = [a for a in plan.assumptions if "refused a better answer" in a]
    assert len(refused) == 2
    assert "GiB may be used" in refused[0]
    assert plan.validation["level"] == "dry"


@pytest.mark.parametrize("request_", [SERVE, TRAIN], ids=["serve", "train"])
def test_excluding_is_exact(request_):
    """The answer without the winner is the best of what is left: excluding something else changes nothing."""
    best = api.solve(request_)
    second = api.solve(request_, excluded=[best.deployment])
    assert second.deployment != best.deployment
    assert second.solver.objective >= best.solver.objective
    assert api.solve(request_, excluded=[second.deployment]).deployment == best.deployment
    assert second.solver.pruned["refused by the check of the real model"] >= 1


def test_all_refused(monkeypatch):
    counting(monkeypatch, lambda n: 500.0)
    with pytest.raises(NoPlanError, match="refused the 5 best answers"):
        module.checked(lambda excluded: api.solve(SERVE, excluded=excluded), quiet)


def test_what_is_not_counted_yet_is_kept_with_a_warning(monkeypatch):
    def refuse(plan):
        raise InvalidValueError("the dry run cannot count this plan yet", "pipeline", "")

    monkeypatch.setattr(module, "dry_run", refuse)
    plan = module.checked(lambda excluded: api.solve(SERVE, excluded=excluded), quiet)
    assert plan.deployment == api.solve(SERVE).deployment
    assert "Not checked by the dry run" in plan.warnings[-1]
    assert plan.validation is None


def test_a_model_that_cannot_be_built_is_refused(monkeypatch):
    real, tries = counting(monkeypatch, lambda n: 0.0), []
    inner = module.dry_run

    def dry_run(plan):
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("heads do not divide")
        return inner(plan)

    monkeypatch.setattr(module, "dry_run", dry_run)
    plan = module.checked(lambda excluded: api.solve(SERVE, excluded=excluded), quiet)
    assert len(real) == 1
    assert any("cannot be built as planned (heads do not divide)" in a for a in plan.assumptions)


def test_the_only_answer_is_refused(monkeypatch):
    counting(monkeypatch, lambda n: 500.0)
    request = replace(
        SERVE, hardware=HardwareFilter(owned="1xl4"), pins=replace(SERVE.pins, precision="bf16", engine="vllm")
    )
    plan = module.checked(lambda excluded: api.solve(request, excluded=excluded), quiet)
    assert plan.status == "infeasible"
    assert any("refused a better answer" in a for a in plan.assumptions)


def test_the_command(capsys, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    words = ["--model", "8b", "--on", "1xl40s", "--engine", "vllm", "--validate", "dry", "--out", str(tmp_path)]
    assert run(["solve", *words]) == 0
    plan = load_plan(tmp_path / "plan.yaml")
    assert "counted on fake tensors; predicted over counted: weights" in capsys.readouterr().out
    assert plan.validation["level"] == "dry"
    assert abs(plan.validation["error_percent"]["weights"]) < 1
    assert run(["solve", "--model", "8b", "--on", "1xl40s", "--validate", "wet"]) == 2
    assert "level of --validate" in capsys.readouterr().err

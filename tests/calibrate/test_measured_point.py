"""Corrections of TPOT and TTFT compose: a plan that was measured gives the measured figures at its load, near saturation too."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cli.main import run
from planner.estimator import corrections
from planner.hardware.catalog import load_catalog
from planner.hardware.records import Correction
from planner.models import load_model
from planner.plan import Plan, load_plan, plan_to_yaml
from planner.plan_seal import sealed
from planner.solver.measured_point import Point, measured_factors, point_of

SHARES = (0.03, 0.5, 0.9, 0.97)  # of the capacity


def serve(own, model, rate, *more):
    return ["solve", "--catalog", str(own), "--on", "1xthis-cpu", "--model", str(model), "--rate", f"{rate:.4f}", "--input-tokens", "128",
            "--output-tokens", "32", "--data-parallel", "1", "--tp", "1", "--engine", "transformers", "--max-num-seqs", "8", *more]  # fmt: skip


@pytest.fixture(scope="module")
def made(own, model, tmp_path_factory) -> dict[float, tuple[Plan, Point, list[str]]]:
    """A plan for each share of the capacity, and its point."""
    place, found = tmp_path_factory.mktemp("points"), {}
    assert run(serve(own, model, 0.01, "--out", str(place / "idle"))) == 0
    capacity = load_plan(place / "idle/plan.yaml").predicted["capacity_requests_per_s"].value
    catalog, spec = load_catalog([own]), load_model(str(model))
    for share in SHARES:
        words = serve(own, model, share * capacity)
        assert run([*words, "--out", str(place / str(share))]) == 0
        plan = load_plan(place / str(share) / "plan.yaml")
        point = point_of(plan, catalog, spec, {m: plan.predicted[m].value for m in ("tpot_ms", "ttft_ms")})
        assert point is not None
        found[share] = plan, point, words
    return found


@given(st.sampled_from(SHARES), st.floats(0.3, 1.0), st.floats(0.2, 5.0))
@settings(max_examples=60)
def test_the_factors_give_what_was_measured(made, share, tpot, ttft):
    """Whatever was measured (TPOT up to what a carried load can have), far from and near saturation."""
    _, point, _ = made[share]
    slow = tpot * (point.slowest() * 0.999) if share < 0.9 else tpot  # slower steps as far as the load is still carried
    expected = point.times_ms(slow, ttft)
    measured = {"tpot_ms": expected[0], "ttft_ms": expected[1]}
    found = point.factors(measured)
    again = point.times_ms(*(2.718281828459045 ** found[m] for m in ("tpot_ms", "ttft_ms")))
    assert again == pytest.approx(expected, rel=1e-6)


def test_slower_steps_alone_leave_nothing_of_ttft(made):
    """Near saturation TTFT grows much more than the steps; that is TPOT's factor at work, and none of TTFT's own."""
    _, point, _ = made[0.9]
    plain, slow = point.times_ms(1.0, 1.0), point.times_ms(1.05, 1.0)
    assert slow[1] / plain[1] > 1.2
    found = point.factors({"tpot_ms": slow[0], "ttft_ms": slow[1]})
    assert found["tpot_ms"] == pytest.approx(0.0488, abs=2e-3)
    assert found["ttft_ms"] == pytest.approx(0.0, abs=1e-2)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("tpot", "ttft"), [(0.8, 0.6), (1.02, 1.9), (0.97, 1.3)])
def test_the_same_plan_solved_again_predicts_what_was_measured(share, tpot, ttft, made, monkeypatch, tmp_path, capsys):
    """Without shrinkage, by the command. (1.02 times slower under 97% of the capacity is carried still.)"""
    from math import exp
    from statistics import fmean

    monkeypatch.setattr(corrections, "shrunk", lambda r, *_: Correction(exp(fmean(r)), 0.9, 1.1, len(r)))
    plan, point, words = made[share]
    wanted = dict(zip(("tpot_ms", "ttft_ms"), point.times_ms(tpot, ttft), strict=True))
    file = tmp_path / "checked.yaml"
    file.write_text(
        plan_to_yaml(replace(plan, validation={"level": "engine", "measured": wanted, "error_percent": {}}))
    )
    assert run([*words, "--calibration", str(file), "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    for metric, value in wanted.items():
        assert after["predicted"][metric]["value"] == pytest.approx(value, rel=2e-3), metric
    lines = after["provenance"]["calibration"]
    assert not any("not reproduced" in line for line in lines)


def test_a_plan_of_another_estimator_is_not_reproduced_and_that_is_said(made, own, model, tmp_path, capsys):
    plan, _, words = made[0.5]
    other = {
        m: replace(r, value=r.value * 2, high=r.high * 2)
        for m, r in plan.predicted.items()
        if m in ("tpot_ms", "ttft_ms")
    }
    measured = {m: r.value * 1.1 for m, r in other.items()}
    changed = replace(
        plan,
        predicted=plan.predicted | other,
        validation={"level": "engine", "measured": measured, "error_percent": {}},
    )
    file = tmp_path / "checked.yaml"
    file.write_text(plan_to_yaml(sealed(changed)))  # as another version of the estimator would have written it
    assert run([*words, "--calibration", str(file), "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["provenance"]["calibration"]
    assert any("is not reproduced, its ratios are taken as factors" in line for line in lines)
    factors = {
        line.split(": ")[1].split(" x ")[0]: float(line.split(" x ")[1].split()[0]) for line in lines if " x " in line
    }
    assert factors["ttft_ms"] == pytest.approx(1.0, abs=1e-3)  # both were 1.1 times longer: nothing is left of TTFT
    assert factors["tpot_ms"] > 1.05


def test_what_cannot_be_timed_has_no_factors(made, own):
    plan, _, _ = made[0.5]
    catalog = load_catalog([own])
    assert (
        measured_factors(
            replace(plan, request=plan.request | {"model": "no-such-model"}), catalog, {"tpot_ms": 1.0}, {}
        )
        is None
    )
    assert measured_factors(replace(plan, deployment=None), catalog, {"tpot_ms": 1.0}, {}) is None

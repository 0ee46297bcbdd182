"""The memory row of a measured run has its 80% interval, or says why it has none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from planner.estimator.uncertainty import training_ranges
from planner.report.validation import engine_tree, print_engine
from planner.validate.engine_verdict import serving_rows, training_rows
from tests.train_emit.plans import tiny
from tests.validate.engine_helpers import serving_plan

MEASURED = {"peak_memory_gib": 1.0, "weights_gib": 1.0, "kv_cache_gib": 1.0}


def peak(rows):
    return next(r for r in rows if r.name == "peak_memory_gib")


def shown(plan, rows, capsys):
    run = SimpleNamespace(rows=rows, verdicts=(), validation=lambda: {"measured": MEASURED}, notes=(), comparable=True)
    print_engine(plan, engine_tree(run), None, json=False)
    return capsys.readouterr().out


def test_training_without_a_correction_has_the_interval_of_all_measured_runs(capsys):
    plan = tiny()
    found = peak(training_rows(plan, MEASURED))
    low, high = training_ranges("memory")
    assert (found.low, found.high) == (plan.memory.total_gib * low, plan.memory.total_gib * high)
    assert ".." in next(line for line in shown(plan, (found,), capsys).splitlines() if "peak_memory_gib" in line)


def test_training_with_a_correction_has_the_interval_of_its_class():
    plan = tiny()
    line = f"{plan.deployment.engine} on {plan.deployment.offers[0].gpu}: peak_memory_gib x 1.05 (80%: 0.93 .. 1.07) from 1 measured, a.yaml"
    plan = replace(plan, provenance=replace(plan.provenance, calibration=(line,)))
    found = peak(training_rows(plan, MEASURED))
    assert (found.low, found.high) == pytest.approx((plan.memory.total_gib * 0.93, plan.memory.total_gib * 1.07))


def test_serving_says_why_it_has_none(capsys):
    plan = serving_plan()
    found = serving_rows(plan, MEASURED)
    assert peak(found).low is None
    text = shown(plan, found, capsys)
    assert "peak_memory_gib: no interval, " in text
    assert "weights_gib, kv_cache_gib: no interval, it follows from sizes" in text

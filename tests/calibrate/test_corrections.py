"""Measured ratios correct predictions of their own class: shrunk, with their interval, in the plan's own words."""

import json
from dataclasses import replace
from math import exp, log

import numpy as np
import pytest

from planner.cli.main import run
from planner.errors import InvalidValueError
from planner.estimator.corrections import MEMORY, corrected, correction, needed_gib, peak_gib, records_of, shrunk
from planner.estimator.operating_point import corrected_time
from planner.estimator.time.serving import ServingTime
from planner.hardware.catalog import load_catalog
from planner.plan import load_plan, plan_to_yaml


def train(own, model, *more):
    return ["solve", "--task", "train", "--catalog", str(own), "--on", "2xthis-cpu", "--model", str(model), "--tokens", "100k", "--seq-len", "256",
            "--global-batch", "8seq", "--framework", "ddp", "--micro-batch-size", "4", "--checkpoint-interval", "0", *more]  # fmt: skip


def serve(own, model, *more):
    return ["solve", "--catalog", str(own), "--on", "1xthis-cpu", "--model", str(model), "--rate", "0.5", "--input-tokens", "128",
            "--output-tokens", "32", "--data-parallel", "1", *more]  # fmt: skip


def validated(command, path, ratios, capsys):
    """The plan of a command with measured = predicted x ratio."""
    assert run([*command, "--out", str(path)]) == 0
    capsys.readouterr()
    plan = load_plan(path / "plan.yaml")
    values = {k: plan.predicted[k].value for k in plan.predicted} | {MEMORY: needed_gib(plan)}
    measured = {k: values[k] * ratio for k, ratio in ratios.items()}
    done = replace(plan, validation={"level": "engine", "measured": measured, "error_percent": {}})
    file = path.with_suffix(".yaml")
    file.write_text(plan_to_yaml(done))
    return file, plan


def solved(command, capsys):
    assert run([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_one_record_is_trusted_for_the_most_part_and_many_almost_wholly():
    one, many = shrunk([log(2)], 0.1, 0.25, 4), shrunk([log(2)] * 20, 0.1, 0.25, 4)
    assert one.factor == pytest.approx(exp(log(2) / (1 + 0.16)))
    assert one.factor < many.factor < 2
    assert many.factor == pytest.approx(2, rel=0.01)
    assert many.high / many.low < one.high / one.low


def test_scattered_records_widen_the_interval():
    even, odd = shrunk([0.1, 0.1, 0.1], 0.1, 0.25, 4), shrunk([-0.4, 0.1, 0.6], 0.1, 0.25, 4)
    assert odd.factor == pytest.approx(even.factor)
    assert odd.high > even.high > 1 > even.low > odd.low


def test_a_training_run_is_corrected(own, model, tmp_path, capsys):
    file, plan = validated(train(own, model), tmp_path / "a", {"step_time_s": 1.5, MEMORY: 0.8}, capsys)
    after = solved(train(own, model, "--calibration", str(file)), capsys)
    factor = exp(log(1.5) / 1.16)
    assert after["predicted"]["step_time_s"]["value"] == pytest.approx(
        plan.predicted["step_time_s"].value * factor, rel=1e-3
    )
    assert after["predicted"]["total_time_h"]["value"] == pytest.approx(
        plan.predicted["total_time_h"].value * factor, rel=1e-3
    )
    assert after["predicted"]["mfu"]["value"] == pytest.approx(plan.predicted["mfu"].value / factor, rel=1e-3)
    assert 0.8 * plan.memory.total_gib < after["memory"]["total_gib"] < plan.memory.total_gib
    assert any("step_time_s" in line and str(file) in line for line in after["provenance"]["calibration"])
    assert any("Corrected by measurement" in line for line in after["assumptions"])


def test_serving_is_corrected(own, model, tmp_path, capsys):
    file, plan = validated(serve(own, model), tmp_path / "a", {"tpot_ms": 2.0, "ttft_ms": 0.7, MEMORY: 1.3}, capsys)
    after = solved(serve(own, model, "--calibration", str(file)), capsys)
    assert after["predicted"]["tpot_ms"]["value"] == pytest.approx(
        plan.predicted["tpot_ms"].value * 2 ** (1 / 1.16), rel=1e-2
    )
    assert after["predicted"]["ttft_ms"]["value"] < plan.predicted["ttft_ms"].value
    assert (
        after["predicted"]["capacity_requests_per_s"]["value"] < 0.7 * plan.predicted["capacity_requests_per_s"].value
    )
    assert after["memory"]["runtime_gib"] > plan.memory.runtime_gib


def test_a_limit_that_measurement_breaks_is_not_promised(own, model, tmp_path, capsys):
    file, plan = validated(serve(own, model), tmp_path / "a", {"tpot_ms": 3.0}, capsys)
    limit = f"{plan.predicted['tpot_ms'].value * 1.2:.3f}ms"
    assert run(serve(own, model, "--tpot", limit)) == 0
    assert run(serve(own, model, "--tpot", limit, "--calibration", str(file))) == 3


def test_a_plan_that_was_corrected_is_not_corrected_twice(own, model, tmp_path, capsys):
    file, plan = validated(train(own, model), tmp_path / "a", {"step_time_s": 1.5}, capsys)
    again, second = validated(
        train(own, model, "--calibration", str(file)), tmp_path / "b", {"step_time_s": 1.0}, capsys
    )
    record = records_of(load_plan(again), "b")[0]
    truth = log(second.predicted["step_time_s"].value / plan.predicted["step_time_s"].value)
    assert record.ratio_ln == pytest.approx(truth, rel=1e-3)


def test_the_same_file_twice_is_one_measurement(own, model, tmp_path, capsys):
    file, _plan = validated(train(own, model), tmp_path / "a", {"step_time_s": 1.5}, capsys)
    catalog, loaded = load_catalog([own]), load_plan(file)
    once, twice = corrected(catalog, [("a", loaded)]), corrected(catalog, [("a", loaded), ("b", loaded)])
    key = (once.gpus["this-cpu"], "ddp", "step_time_s")
    assert correction(*key) == correction(twice.gpus["this-cpu"], "ddp", "step_time_s")
    assert correction(once.gpus["this-cpu"], "fsdp2", "step_time_s").records == 0
    assert correction(once.gpus["h100-sxm"], "ddp", "step_time_s").factor == 1.0


def test_other_classes_are_left_alone_and_said_so(own, model, tmp_path, capsys):
    file, _ = validated(train(own, model), tmp_path / "a", {"step_time_s": 1.5}, capsys)
    command = ["solve", "--model", "8b", "--provider", "aws", "--gpu", "l40s"]
    plain, beside = solved(command, capsys), solved([*command, "--calibration", str(file)], capsys)
    assert plain["predicted"] == beside["predicted"]
    assert any("hold nothing of" in line for line in beside["assumptions"])
    assert any("not used" in line for line in beside["provenance"]["calibration"])


def test_estimate_takes_it_too(own, model, tmp_path, capsys):
    file, plan = validated(train(own, model), tmp_path / "a", {"step_time_s": 1.5}, capsys)
    command = ["estimate", *train(own, model)[1:], "--calibration", str(file), "--json"]
    assert run(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted"]["step_time_s"]["value"] > 1.3 * plan.predicted["step_time_s"].value


@pytest.mark.parametrize("measured", [None, {}, {"step_time_s": None}, {"weights (GiB)": 3.0}, {"ttft_ms": -1}])
def test_a_record_without_measured_times_is_bad_input(own, model, tmp_path, measured, capsys):
    _file, plan = validated(train(own, model), tmp_path / "a", {}, capsys)
    tree = None if measured is None else {"level": "dry", "measured": measured, "error_percent": {}}
    with pytest.raises(InvalidValueError, match="holds no"):
        records_of(replace(plan, validation=tree), "x")
    if measured is None:
        assert run(train(own, model, "--calibration", str(tmp_path / "a/plan.yaml"))) == 2


@pytest.mark.parametrize(
    "value", [-1, 0, float("nan"), float("inf"), 1e300, 10**400, "fast", "x" * 1000, True, [1.0], {"a": 1}]
)
@pytest.mark.parametrize("metric", ["step_time_s", "peak_memory_gib"])
def test_a_measured_value_that_none_can_have_is_named(own, model, tmp_path, metric, value, capsys):
    _file, plan = validated(train(own, model), tmp_path / "a", {}, capsys)
    good = {"step_time_s": 1.0, "peak_memory_gib": 1.0}
    tree = {"level": "engine", "measured": good | {metric: value}, "error_percent": {}}
    with pytest.raises(InvalidValueError) as caught:
        records_of(replace(plan, validation=tree), "x.yaml")
    assert f"x.yaml: validation.measured.{metric} is " in str(caught.value)
    assert len(str(caught.value)) < 320


def test_a_bad_measured_value_ends_the_command_with_2(own, model, tmp_path, capsys):
    file, plan = validated(train(own, model), tmp_path / "a", {"step_time_s": 1.5}, capsys)
    file.write_text(plan_to_yaml(replace(plan, validation={"level": "engine", "measured": {"step_time_s": -2.0}})))
    assert run(train(own, model, "--calibration", str(file))) == 2
    err = capsys.readouterr().err
    assert "validation.measured.step_time_s is -2.0" in err
    assert len(err.splitlines()) == 1


def test_slower_by_f_under_a_rate_is_as_busy_as_f_times_the_rate():
    one = np.ones(1)
    time = ServingTime(
        one * 0.2, one * 0.3, one * 0.05, one * 1.2, one * 40, one * 4, one * 8, one * 0.5, one * 2.0, one > 0
    )
    slow = corrected_time(time, one * 2, one * 3, 21.0)
    assert (slow.tpot_s[0], slow.ttft_p95_s[0], slow.max_rate_per_s[0]) == pytest.approx((0.1, 1.8, 1.0))
    assert slow.e2e_s[0] == pytest.approx(0.2 * 6 + 20 * 0.1)  # TTFT holds the slower steps too
    assert slow.utilisation[0] == 0.5


def compared(words, capsys, *more):
    words = ["compare", *words[1:], "--json", *more]
    assert run(words) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


@pytest.mark.parametrize(("ask", "metric"), [(train, "step_time_s"), (serve, "tpot_ms")])
def test_a_table_is_corrected_too_and_says_so(ask, metric, own, model, tmp_path, capsys):
    before, _ = compared(ask(own, model), capsys)
    file, plan = validated(ask(own, model), tmp_path / "a", {metric: 2.0}, capsys)
    after, err = compared(ask(own, model), capsys, "--calibration", str(file))
    by_engine = {c["deployment"]["engine"]: c for c in after}
    mine = by_engine[plan.deployment.engine]
    assert mine["note"] == "corrected by measurement"
    assert mine["predicted"][metric]["value"] == pytest.approx(
        before[0]["predicted"][metric]["value"] * 2 ** (1 / 1.16), rel=2e-2
    )
    assert err == ""
    assert before[0]["note"] == ""


def test_a_table_of_other_hardware_says_that_nothing_is_corrected(own, model, tmp_path, capsys):
    file, _ = validated(train(own, model), tmp_path / "a", {"step_time_s": 1.5}, capsys)
    words = ["compare", "--model", "8b", "--gpu", "l40s", "--catalog", str(own), "--calibration", str(file), "--json"]
    assert run(words) == 0
    out, err = capsys.readouterr()
    assert "nothing is corrected" in err
    assert all(c["note"] == "" for c in json.loads(out))


def test_the_peak_of_a_run_is_the_need_unless_the_engine_fills_a_budget(own, model, tmp_path, capsys):
    plan = validated(serve(own, model), tmp_path / "a", {"tpot_ms": 2.0}, capsys)[1]
    assert peak_gib(plan) == needed_gib(plan) < plan.memory.total_gib
    filling = replace(plan, deployment=replace(plan.deployment, engine="vllm"))
    assert peak_gib(filling) == plan.memory.total_gib
    trained = validated(train(own, model), tmp_path / "b", {"step_time_s": 1.5}, capsys)[1]
    assert peak_gib(trained) == trained.memory.total_gib

"""Edges of options and of the public functions: each is one line and the right exit code."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import planner
from planner.cli.main import run
from planner.errors import InputError
from planner.plan import Deployment
from planner.request import HardwareFilter, Limits, Pins, ServeRequest, TrainJob, TrainLimits, TrainPins, Workload
from tests.calibrate.cpu import folder

SOLVE = ["solve", "--model", "8b", "--on", "1xh100-sxm"]
REQUEST = ServeRequest(model="8b")


def refused(capsys, words, said):
    assert run([str(w) for w in words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["catalog", "list", "--limit", "-1"], "--limit -1 is below 0. Write --limit 40, or --limit 0 for all."),
        (["catalog", "list", "--gpus-min", "0"], "--gpus-min 0 is below 1"),
        ([*SOLVE, "--max-accuracy-loss", "200%"], "--max-accuracy-loss must be 0 to 100 percent, not 200"),
        ([*SOLVE, "--tp", "0"], "--tensor-parallel '0' must be a positive whole number. Write for example --tensor-parallel 8."),
        ([*SOLVE, "--tp", "-2"], "--tensor-parallel '-2' must be a positive whole number"),
        ([*SOLVE, "--tp", "x"], "Write for example --tensor-parallel 8."),
        (["solve", "--model", "8b", "--on", "1x16xh100-sxm", "--engine", "deepspeed_inference", "--tp", "16"], "those beyond 8 would hold no attention. Choose at most 8"),
        (["calibrate", "--out", "measured", "--name", "h100-sxm"], "of the packaged catalog"),
        (["calibrate", "--out", "measured", "--name", "h100"], "Write for example --name this-h100-sxm."),
    ],
)  # fmt: skip
def test_values_that_cannot_be(capsys, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    refused(capsys, words, said)
    assert not list(tmp_path.iterdir())


def test_limit_counts_offers_and_0_is_all(capsys):
    def shown(*words):
        assert run(["catalog", "list", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    everything = shown()
    assert len(everything) > 100
    assert shown("--limit", "3") == everything[:3]
    assert shown("--limit", "0") == everything


def test_a_reader_that_leaves_ends_the_command_quietly():
    command = f"{sys.executable} -m planner catalog list --json --limit 0 | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("141", "")


@pytest.mark.parametrize(("model", "device"), [("8b", "this-cpu"), ("70b", "l4")])
def test_memory_is_named_where_nothing_fits_it(tmp_path, capsys, model, device):
    catalog = folder(tmp_path / "catalog", devices=1)
    words = ["solve", "--model", model, "--catalog", catalog, "--on", f"1x{device}", "--json"]
    assert run([str(w) for w in words]) == 3
    core = json.loads(capsys.readouterr().out)["infeasible"]["core"]
    assert [line.partition(":")[0] for line in core] == ["GPU memory"]


def test_autotp_is_not_searched_beyond_the_key_value_heads():
    """Qwen2.5 3B has two key/value heads: four and eight ranks are left to engines that copy them."""
    hardware = HardwareFilter(owned="1x8xh100-sxm")
    found = planner.compare(
        ServeRequest(
            model="llama-3.1-8b", hardware=hardware, pins=Pins(engine="deepspeed_inference", tensor_parallel=8)
        )
    )
    assert found[0].deployment.tensor_parallel == 8
    small = ServeRequest(
        model="qwen2.5-3b", hardware=hardware, pins=Pins(engine="deepspeed_inference", tensor_parallel=4)
    )
    with pytest.raises(InputError, match="beyond 2"):
        planner.solve(small)
    assert (
        planner.solve(
            ServeRequest(model="qwen2.5-3b", hardware=hardware, pins=Pins(engine="deepspeed_inference"))
        ).deployment.tensor_parallel
        <= 2
    )


@pytest.mark.parametrize("function", ["solve", "compare", "estimate", "memory"])
def test_a_request_of_another_type_names_the_right_one(function):
    for wrong in ("8b", None, {"model": "8b"}, ServeRequest):
        with pytest.raises(InputError, match="request must be a ServeRequest or TrainRequest, not"):
            getattr(planner, function)(wrong)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: planner.load_plan(7), "from a path, not from a int"),
        (lambda: planner.load_plan(None), "from a path"),
        (lambda: planner.solve(REQUEST, calibration="measured.yaml"), "calibration must be a list or tuple, not str"),
        (lambda: planner.compare(REQUEST, calibration=[3]), "a file of calibration must be a str or Path, not int"),
        (
            lambda: planner.solve(REQUEST, excluded=["x"]),
            f"an entry of excluded must be a {Deployment.__name__}, not str",
        ),
        (lambda: ServeRequest(model=8), "model must be a str, not int"),
        (lambda: ServeRequest(model="8b", workload={}), "workload must be a Workload"),
        (lambda: Workload(input_tokens="x"), "Workload.input_tokens must be a whole number, not 'x'"),
        (lambda: Limits(max_accuracy_loss_percent=None), "Limits.max_accuracy_loss_percent must be a number, not None"),
        (lambda: Limits(ttft_s="200ms"), "Limits.ttft_s must be a number"),
        (lambda: Pins(tensor_parallel="2"), "Pins.tensor_parallel must be a whole number, not '2'"),
        (lambda: Pins(tensor_parallel=True), "Pins.tensor_parallel must be a whole number, not True"),
        (lambda: Pins(engine=5), "Pins.engine must be a str, not 5"),
        (lambda: HardwareFilter(providers="aws"), "HardwareFilter.providers must be a tuple of str, not 'aws'"),
        (lambda: TrainJob(packing=1), "TrainJob.packing must be True or False, not 1"),
        (lambda: TrainLimits(max_gpus=1.5), "TrainLimits.max_gpus must be a whole number, not 1.5"),
        (lambda: TrainPins(zero_stage="x"), "TrainPins.zero_stage must be a whole number, not 'x'"),
    ],
)
def test_wrong_types_are_input_errors(call, said):
    with pytest.raises(InputError, match=said):
        call()

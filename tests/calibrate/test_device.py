"""The device level times a shard, writes the contract's names, and its record feeds --calibration; the prepared script runs on CPU."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner.cli.main import run
from planner.errors import InvalidValueError
from planner.estimator.corrections import records_of
from planner.plan import load_plan, plan_to_yaml
from planner.validate import device
from tests.calibrate.cpu import TINY, folder

ROOT = Path(__file__).resolve().parents[2]
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="the extra profile is not installed",
)


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    base = tmp_path_factory.mktemp("device")
    (base / "tiny").mkdir()
    (base / "tiny/config.json").write_text(
        json.dumps(TINY | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2})
    )
    folder(base / "mine")
    common = ["--catalog", str(base / "mine"), "--model", str(base / "tiny")]
    kinds = {
        "serve": ["--on", "1xthis-cpu", "--rate", "1", "--input-tokens", "32", "--output-tokens", "8"],
        "ddp": ["--on", "1xthis-cpu", "--task", "train", "--tokens", "10k", "--seq-len", "64", "--global-batch", "2seq", "--framework", "ddp"],
        "zero3": ["--on", "2xthis-cpu", "--task", "train", "--tokens", "10k", "--seq-len", "64", "--global-batch", "4seq", "--framework", "deepspeed",
                  "--zero-stage", "3", "--checkpoint-interval", "1"],
    }  # fmt: skip
    for name, options in kinds.items():
        assert run(["solve", *common, *options, "--out", str(base / name)]) == 0
    return base


def here(plans, name, monkeypatch):
    """The plan as if it had been made for this very processor."""
    pytest.importorskip("torch")
    monkeypatch.setattr(device, "cpu_name", lambda: "a processor")
    return plans / name / "plan.yaml"


@needs_torch
@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("serve", {"tpot_ms", "ttft_ms", "peak_memory_gib"}),
        ("ddp", {"step_time_s", "peak_memory_gib"}),
        ("zero3", {"step_time_s"}),
    ],
)
def test_a_shard_is_timed(plans, name, metrics, monkeypatch, tmp_path, capsys):
    file, out, trace = here(plans, name, monkeypatch), tmp_path / "checked.yaml", tmp_path / "trace.json"
    assert run(["validate", str(file), "--level", "device", "--out", str(out), "--profile", str(trace), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert all(row["counted"] > 0 and row["predicted"] > 0 for row in tree["parts"])
    assert any("nsys profile" in note for note in tree["notes"])
    plan = load_plan(out)
    assert metrics <= set(plan.validation["measured"])
    assert plan.validation["level"] == "device"
    assert {r.metric for r in records_of(plan, "x")} == metrics
    assert "traceEvents" in trace.read_text()
    command = [
        "estimate",
        "--catalog",
        str(plans / "mine"),
        "--model",
        str(plans / "tiny"),
        "--on",
        "1xthis-cpu",
        "--engine",
        "transformers",
    ]
    if name == "serve":
        assert (
            run([*command, "--rate", "1", "--input-tokens", "32", "--output-tokens", "8", "--calibration", str(out)])
            == 0
        )
        assert "Corrected by measurement" in capsys.readouterr().out


@needs_torch
def test_another_machine_says_so_and_calibrates_nothing(plans, tmp_path, capsys):
    out = tmp_path / "checked.yaml"
    assert run(["validate", str(plans / "ddp/plan.yaml"), "--level", "device", "--out", str(out)]) == 0
    assert "say nothing about the plan" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(InvalidValueError, match="no measured time"):
        records_of(load_plan(out), "x")


@needs_torch
def test_a_gpu_plan_without_a_gpu_is_refused(tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (
        run(
            [
                "solve",
                "--model",
                "8b",
                "--on",
                "1xl40s",
                "--engine",
                "vllm",
                "--precision",
                "bf16",
                "--rate",
                "0.1",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert run(["validate", str(tmp_path / "plan.yaml"), "--level", "device"]) == 2
    assert "sees no GPU" in capsys.readouterr().err


@needs_torch
def test_memory_that_runs_out_is_one_line(plans, monkeypatch, capsys):
    from planner.validate import device_train

    def full(*_):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        )

    file = here(plans, "ddp", monkeypatch)
    monkeypatch.setattr(device_train, "build", full)
    assert run(["validate", str(file), "--level", "device"]) == 2
    assert "does not fit this device" in capsys.readouterr().err


def test_what_has_no_stand_in_is_refused(plans, tmp_path, capsys):
    plan = load_plan(plans / "zero3/plan.yaml")
    for changed in ({"offload": "optimizer"}, {"method": "lora", "lora_rank": 8}, {"checkpoint_interval": 2}):
        file = tmp_path / "plan.yaml"
        file.write_text(
            plan_to_yaml(
                replace(plan, deployment=replace(plan.deployment, train=replace(plan.deployment.train, **changed)))
            )
        )
        assert run(["validate", str(file), "--level", "device"]) == 2
        assert "cannot time this plan" in capsys.readouterr().err


def test_a_trace_needs_the_device_level(plans, capsys):
    assert run(["validate", str(plans / "ddp/plan.yaml"), "--profile", "x.json"]) == 2
    assert "--level device" in capsys.readouterr().err


@pytest.mark.parametrize("trace", ["", "no/such/folder/trace.json", "."])
def test_a_trace_that_cannot_be_written_is_said_before_anything_is_measured(
    trace, plans, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(device, "device_run", lambda *_: pytest.fail("it was measured"))
    monkeypatch.chdir(tmp_path)
    assert run(["validate", str(plans / "ddp/plan.yaml"), "--level", "device", "--profile", trace]) == 2
    err = capsys.readouterr().err
    assert "--profile" in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_all_layers_lie_on_the_line():
    assert device.line(2.0, 4.0, 1) == 2.0
    assert device.line(2.0, 4.0, 3) == 4.0
    assert device.line(2.0, 4.0, 32) == pytest.approx(33.0)


@needs_torch
def test_the_prepared_script_runs_on_a_cpu(tmp_path):
    out = tmp_path / "proof"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/gpu-proof"), "--cpu", "--seconds", "2", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (out / "machine/kernels/this-cpu.csv").exists()
    tree = json.loads((out / "table.json").read_text())
    assert {row["part"] for row in tree["train"]["parts"]} >= {"micro-batch", "optimizer step"}
    assert "decode step" in (out / "table.txt").read_text()
    assert load_plan(out / "serve.yaml").validation["measured"]["tpot_ms"] > 0

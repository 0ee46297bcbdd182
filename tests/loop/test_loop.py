"""The whole loop on this machine's CPU: calibrate, solve on it, emit, measure with the real engine, solve again corrected.

Two CPU processes and a tiny random Llama. DeepSpeed compiles its collectives at a first run (torch_extensions), which the timeout allows for. Nothing depends on how fast the machine is: only on what is told of what was measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from math import log
from pathlib import Path
from typing import Any

import pytest

from planner.cli.main import run
from planner.plan import Plan, load_plan
from planner.validate.engine_process import free_port, is_open
from tests.train_runs.runs import need
from tests.train_runs.tinymodel import make
from tests.validate.engine_helpers import buffers, left_over

SECONDS = "1"  # of measuring: the shortest that calibrate takes
# One user: without a queue a slow machine is slow in proportion, and no correction meets another
LOAD = ["--concurrency", "1", "--input-tokens", "32", "--output-tokens", "16", "--max-num-seqs", "4", "--tp", "1", "--engine", "transformers"]  # fmt: skip
JOB = ["--task", "train", "--tokens", "100k", "--seq-len", "64", "--global-batch", "8seq", "--checkpoint-interval", "0"]
HERE = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
CLOSE = 0.02  # a prediction this close to the measurement (in logarithms) needs no moving

pytestmark = need("torch", "transformers", "accelerate", "deepspeed")


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/ and the catalog mine/ of this machine."""
    folder = tmp_path_factory.mktemp("loop")
    make(folder)
    done = planner(folder, "calibrate", "--out", "mine", "--device", "cpu", "--processes", "2", "--seconds", SECONDS)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in (folder / "mine").iterdir()} == {"gpus.yaml", "links.yaml", "kernels"}
    return folder


def planner(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with an empty folder for temporary files that must be empty again."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as temporary:
        env = os.environ | {"TMPDIR": temporary, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "planner", *words],
            env=env, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert list(Path(temporary).iterdir()) == []
    return done


def check_measured(plan: Plan, file: Path, metrics: list[str]) -> dict[str, float]:
    """What was measured: level, numbers and errors are in the file."""
    found = load_plan(file).validation
    assert found is not None
    assert found["level"] == "engine"
    assert found["hardware"] == "as planned"
    for name in metrics:
        measured, predicted = found["measured"][name], plan.predicted[name].value
        assert found["error_percent"][name] == pytest.approx((predicted / measured - 1) * 100, abs=0.02)
    assert 0.05 < found["measured"]["peak_memory_gib"] < 16
    assert "peak_memory_gib" in found["error_percent"]
    return dict(found["measured"])


def check_corrected(before: Plan, after: Plan, measured: dict[str, float], file: str, metrics: list[str]) -> None:
    """The second plan names the file and predicts closer to what was measured."""
    lines = after.provenance.calibration
    assert {line.split(": ")[1].split(" x ")[0] for line in lines} == {*metrics, "peak_memory_gib"}
    assert all(line.endswith(f"from 1 measured, {file}") for line in lines)
    assert any("Corrected by measurement" in line for line in after.assumptions)
    assert before.provenance.calibration == ()
    assert before.deployment == after.deployment
    for name in metrics:
        was, now = (abs(log(p.predicted[name].value / measured[name])) for p in (before, after))
        assert now < was or now < CLOSE, (name, was, now)
        low, high = after.predicted[name].low, after.predicted[name].high
        assert low < after.predicted[name].value < high


def check_nothing_left(marker: Path, port: int) -> None:
    assert left_over(str(marker)) == []
    assert not is_open(port)
    assert buffers(port) == []


def test_serving_with_transformers(machine: Path) -> None:
    base = ["--catalog", "mine", "--on", "2xthis-cpu", "--model", "model", *LOAD]
    port = free_port()
    steps = [
        ["solve", *base, "--out", "plan"],
        ["emit", "plan/plan.yaml", "--out", "files"],
        ["validate", "plan/plan.yaml", "--level", "engine", "--files", "files", "--requests", "10", "--port", str(port),
         "--env", HERE, "--out", "checked.yaml", "--timeout", "3m", "--json"],
        ["solve", *base, "--calibration", "checked.yaml", "--out", "again"],
    ]  # fmt: skip
    said = []
    for words in steps:
        done = planner(machine, *words)
        assert done.returncode == 0, (words, done.stderr)
        said.append(done.stdout)
    check_nothing_left(machine / "model", port)
    before, after = (load_plan(machine / name / "plan.yaml") for name in ("plan", "again"))
    measured = check_measured(before, machine / "checked.yaml", ["ttft_ms", "tpot_ms", "e2e_ms"])
    assert json.loads(said[2])["validation"]["requests"] == 10
    assert measured["output_tokens_mean"] == 16
    check_corrected(before, after, measured, "checked.yaml", ["ttft_ms", "tpot_ms"])
    too_fast = f"{measured['tpot_ms'] / 20:.6f}ms"
    refused = planner(machine, "solve", *base, "--calibration", "checked.yaml", "--tpot", too_fast)
    assert refused.returncode == 3, refused.stderr
    unmeasured = planner(machine, "solve", *base, "--calibration", "plan/plan.yaml")
    assert unmeasured.returncode == 2
    assert "holds no validation" in unmeasured.stderr


@pytest.mark.parametrize(("stack", "stage"), [("deepspeed", 2), ("fsdp2", 3)])
def test_training(stack: str, stage: int, machine: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = ["solve", "--catalog", str(machine / "mine"), "--on", "2xthis-cpu", "--model", str(machine / "model"), *JOB,
            "--framework", stack, "--zero-stage", str(stage), "--dp", "2", "--micro-batch-size", "4"]  # fmt: skip
    plan, files, checked, port = tmp_path / "plan/plan.yaml", tmp_path / "files", tmp_path / "checked.yaml", free_port()
    assert run([*base, "--out", str(plan.parent)]) == 0
    assert run(["emit", str(plan), "--out", str(files)]) == 0
    code = run(["validate", str(plan), "--level", "engine", "--files", str(files), "--steps", "5", "--port", str(port),
                "--env", HERE, "--timeout", "8m", "--out", str(checked)])  # fmt: skip
    assert code == 0, capsys.readouterr().err
    assert run([*base, "--calibration", str(checked), "--out", str(tmp_path / "again")]) == 0
    check_nothing_left(machine / "model", port)
    assert list(temporary.iterdir()) == []
    before, after = load_plan(plan), load_plan(tmp_path / "again/plan.yaml")
    measured = check_measured(before, checked, ["step_time_s", "tokens_per_s_per_gpu"])
    assert load_plan(checked).validation["steps"] == 3
    assert before.deployment.gpus == 2
    check_corrected(before, after, measured, str(checked), ["step_time_s"])

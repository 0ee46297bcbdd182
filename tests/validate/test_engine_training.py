"""Training runs with stand-ins for launch.sh: what ends them, and that nothing stays."""

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from planner.cli.main import run
from planner.engines.training import framework
from planner.errors import InvalidValueError
from planner.plan import load_plan
from planner.validate import engine
from planner.validate.engine_load import Load
from planner.validate.engine_run import Launch, Options
from planner.validate.engine_training import script_environment, settings_of, synthetic_text
from planner.validate.engine_verdict import training_rows
from tests.train_emit.plans import tiny
from tests.validate.engine_helpers import left_over, saved

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")

WORKER = """
import json, os, sys, time
os.setsid()  # as torchrun's workers: out of the launcher's group
os.makedirs(os.environ["OUTPUT_DIR"], exist_ok=True)
with open(os.environ["OUTPUT_DIR"] + "/metrics.jsonl", "a") as file:
    for step in range(1, int(sys.argv[1]) + 1):
        row = {"event": "step", "step": step, "step_time_s": 9.0 if step < 3 else 0.1 * step, "tokens_per_s": 512.0 * step}
        file.write(json.dumps(row | {"peak_allocated_gib": 2.0, "peak_reserved_gib": 3.0 + step}) + "\\n")
        file.flush()
        time.sleep(0.05)
print(sys.argv[2].replace("|", "\\n"), flush=True)
sys.exit(int(sys.argv[3]))
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    (tmp_path / "worker.py").write_text(WORKER)
    yield
    assert left_over(str(tmp_path / "worker.py")) == []
    assert list(place.iterdir()) == []


def validate(tmp_path, steps, said, code, *words):
    files = tmp_path / "files"
    files.mkdir()
    start = f"{sys.executable} {tmp_path / 'worker.py'} {steps} '{said}' {code}"
    (files / "launch.sh").write_text(f'echo "$EXTRA_ARGS|$DATASET" >{tmp_path}/seen; {start} & wait $!\n')
    path = saved(tiny("deepspeed", zero_stage=2), tmp_path)
    return run(["validate", str(path), "--level", "engine", "--files", str(files), "--cpu", *words]), path


def test_a_run_is_ended_after_its_steps(capsys, tmp_path):
    code, path = validate(tmp_path, 1000, "", 0, "--steps", "7", "--json")
    out, err = capsys.readouterr()
    assert code == 0, err
    measured = json.loads(out)["validation"]["measured"]
    assert measured["step_time_s"] == pytest.approx(0.5)  # median of steps 3 to 7; the first two are not counted
    assert measured["tokens_per_s"] == pytest.approx(512 * 5)
    n = framework("deepspeed").number  # what torch's allocator does not see is added, as the plan's total has it
    assert measured["peak_memory_gib"] == pytest.approx(10.0 + n("context_gib") + n("nccl_gib"))
    assert measured["peak_allocated_gib"] == 2.0
    assert load_plan(path).validation["steps"] == 5
    arguments, dataset = (tmp_path / "seen").read_text().strip().split("|")
    assert arguments == "--save-every 1000000000 --cpu"
    assert dataset.endswith("text.txt")
    assert not os.path.exists(dataset)


def test_a_run_shorter_than_asked_is_made_longer_so_that_it_does_not_save():
    made = tiny()
    options = Options(Load(((1, 1),), 1.0), steps=8)
    assert script_environment(made, options, "out", "data")["EXTRA_ARGS"] == "--save-every 1000000000 --steps 9"
    assert "--steps" not in script_environment(made, replace(options, steps=7), "out", "data")["EXTRA_ARGS"]


def test_out_of_memory_says_what_fitted_and_what_to_try(capsys, tmp_path):
    said = "OUT OF MEMORY on rank 1: CUDA out of memory|NEXT: half the micro-batch: MICRO_BATCH_SIZE=1 bash launch.sh"
    code, path = validate(tmp_path, 2, said, 12)
    err = capsys.readouterr().err
    assert code == 2
    assert "ended with exit code 12 after 2 steps: the GPU ran out of memory" in err
    assert "It says itself: half the micro-batch: MICRO_BATCH_SIZE=1 bash launch.sh" in err
    assert "The steps before it took peak allocated 2.00 GiB, peak reserved 5.00 GiB" in err
    assert load_plan(path).validation is None


def test_a_run_that_ends_early_is_measured_over_what_it_did(capsys, tmp_path):
    code, _ = validate(tmp_path, 4, "", 0, "--steps", "20")
    assert code == 0
    assert "Median of 2 steps; the first 2 are not counted." in capsys.readouterr().out


def test_a_hub_that_is_not_resolved_is_the_cause_of_a_timeout(capsys, tmp_path):
    said = "[Errno -2] Name or service not known thrown while requesting HEAD https://huggingface.co/x/resolve/main/config.json|Retrying in 8s."
    code, _ = validate(tmp_path, 0, said + "'; sleep 60 #'", 0, "--timeout", "2s")
    assert code == 2
    assert (
        "within 2 s: the hub cannot be reached, its name is not resolved here. Check the network"
        in capsys.readouterr().err
    )


def test_too_slow(capsys, tmp_path):
    code, _ = validate(tmp_path, 10_000, "", 0, "--steps", "9000", "--timeout", "700ms")
    assert code == 2
    assert "of 9000 steps were done within 0.7 s" in capsys.readouterr().err


def test_a_plan_for_cpu_devices_runs_on_cpus_and_is_compared(monkeypatch):
    made = tiny()
    monkeypatch.setattr(engine, "on_cpu", lambda plan: True)
    seen = []
    monkeypatch.setattr(engine, "train_and_measure", lambda plan, launch, options, tell: seen.append(options))
    engine.engine_run(made, Launch(Path()), Options(Load(((1, 1),), 1.0), env={"A": "b"}), lambda *_: None)
    assert seen[0].cpu
    assert seen[0].env == {"A": "b", "VLLM_CPU_KVCACHE_SPACE": "1"}
    rows = {r.name: r.predicted for r in training_rows(made, {"peak_memory_gib": 3.0, "peak_host_gib": 3.0})}
    assert rows["peak_memory_gib"] == made.memory.total_gib


def test_megatron_is_not_measured_yet():
    made = tiny()
    with pytest.raises(InvalidValueError, match="Megatron-Bridge is not measured yet"):
        settings_of(replace(made, deployment=replace(made.deployment, engine="megatron_bridge")))


def test_the_text_is_enough_for_two_global_batches(tmp_path):
    made = tiny(zero_stage=2)
    train = made.deployment.train
    words = synthetic_text(made, tmp_path / "text.txt").read_text().split()
    assert len(words) > 2 * train.global_batch_size * train.seq_len

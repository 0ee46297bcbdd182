"""Launch files of a CPU plan: no GPU is named, every process keeps to its share of the cores."""

import json
import subprocess

import pytest

from planner.cli.main import run
from planner.plan import load_plan, plan_to_yaml
from tests.calibrate.cpu import TINY, folder


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    base = tmp_path_factory.mktemp("cpu")
    (base / "tiny").mkdir()
    (base / "tiny/config.json").write_text(json.dumps(TINY))
    folder(base / "mine")
    return base


def files(where, out, *more):
    command = [
        "solve",
        "--catalog",
        str(where / "mine"),
        "--on",
        "2xthis-cpu",
        "--model",
        str(where / "tiny"),
        "--out",
        str(out),
        *more,
    ]
    assert run(command) == 0
    return {p.name: p.read_text() for p in out.iterdir()}


TRAIN = ["--task", "train", "--tokens", "100k", "--seq-len", "256", "--global-batch", "8seq"]
SERVE = ["--rate", "0.5", "--input-tokens", "128", "--output-tokens", "32"]


@pytest.mark.parametrize(
    "more",
    [[*TRAIN, "--framework", s, "--zero-stage", z] for s, z in (("fsdp2", "3"), ("deepspeed", "2"), ("ddp", "0"))],
)
def test_training_runs_on_cores(where, tmp_path, more):
    found = files(where, tmp_path / "out", *more)
    launch = found["launch.sh"]
    assert "--cpu" in launch
    assert 'OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"' in launch
    assert 'CUDA_VISIBLE_DEVICES=""' in launch
    assert "accelerate launch" not in launch
    assert not {"kubernetes.yaml", "train.slurm", "accelerate.yaml", "skypilot.yaml"} & set(found)


@pytest.mark.parametrize(
    "more",
    [[*SERVE, "--data-parallel", "1"], [*SERVE, "--data-parallel", "2"], [*SERVE, "--tp", "2", "--max-num-seqs", "4"]],
)
def test_serving_runs_on_cores(where, tmp_path, more):
    found = files(where, tmp_path / "out", *more)
    assert 'OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"' in found["serve.sh"]
    assert "seq -s" not in found["serve.sh"]
    assert not {"kubernetes.yaml", "docker-compose.yaml", "serve.slurm", "monitor.sh"} & set(found)
    assert "this machine" in found["LAUNCH.md"]


def test_scripts_are_shell(where, tmp_path):
    for name, more in (("a", [*TRAIN, "--framework", "fsdp2"]), ("b", [*SERVE, "--data-parallel", "2"])):
        files(where, tmp_path / name, *more)
        for script in (tmp_path / name).glob("*.sh"):
            assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0, script


def test_the_share_of_cores_survives_the_plan_file(where, tmp_path):
    files(where, tmp_path / "out", *TRAIN)
    plan = load_plan(tmp_path / "out/plan.yaml")
    assert plan.deployment.offers[0].cpu_threads == 1
    assert "cpu_threads: 1" in plan_to_yaml(plan)


@pytest.mark.parametrize("target", ["kubernetes", "slurm"])
def test_other_targets_say_why(where, tmp_path, target, capsys):
    files(where, tmp_path / "out", *TRAIN)
    assert run(["emit", str(tmp_path / "out/plan.yaml"), "--out", str(tmp_path / "x"), "--target", target]) == 2
    assert "CPU processes" in capsys.readouterr().err

"""launch.sh with stand-ins for the launchers: the very words they get, also under hostile names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from planner.emit import render, write_files
from planner.errors import InvalidValueError
from planner.plan import Plan
from tests.train_emit.plans import offer, plan

WORDS = "launch.sh"
STAND_IN = '#!/bin/bash\nprintf "%s\\0" "$(basename "$0")" "$@" > "$OUT"\n'


def started(made: Plan, folder: Path, **env: str) -> list[str]:
    """The words of the program that launch.sh ends in."""
    out, bin_dir = folder / "words", folder / "bin"
    shutil.rmtree(bin_dir, ignore_errors=True)
    bin_dir.mkdir(parents=True)
    for name in ("deepspeed", "torchrun", "accelerate"):
        (bin_dir / name).write_text(STAND_IN)
        (bin_dir / name).chmod(0o755)
    write_files(made, folder, targets=("train",), force=True)
    clean = {"PATH": f"{bin_dir}:{os.defpath}", "OUT": str(out), "DATASET": "data.txt"} | env
    done = subprocess.run(
        ["bash", str(folder / WORDS)], env=clean, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return out.read_text().split("\0")[:-1]


def after(found: list[str], option: str) -> str:
    return found[found.index(option) + 1]


def test_one_machine_starts_the_frameworks_launcher(tmp_path: Path) -> None:
    found = started(plan(), tmp_path / "a", OUTPUT_DIR="my out", EXTRA_ARGS="--steps 5")
    assert found[0] == "deepspeed"
    assert after(found, "--num_gpus") == "8"
    assert [after(found, o) for o in ("--model", "--dataset", "--output")] == [
        "meta-llama/Llama-3.1-8B",
        "data.txt",
        "my out",
    ]
    assert found[-2:] == ["--steps", "5"]
    found = started(plan(engine="fsdp2"), tmp_path / "b")
    assert found[:2] == ["accelerate", "launch"]
    assert after(found, "--config_file").endswith("/accelerate.yaml")
    found = started(plan(engine="fsdp2"), tmp_path / "b", LAUNCHER="torchrun")
    assert found[0] == "torchrun"
    assert (after(found, "--nnodes"), after(found, "--nproc-per-node")) == ("1", "8")


@pytest.mark.parametrize("engine", ["deepspeed", "torchtitan", "megatron_bridge"])
def test_every_machine_meets_at_the_first(engine: str, tmp_path: Path) -> None:
    made = plan("70b", engine, dp=16, zero_stage=3)
    found = started(made, tmp_path, HOSTS="a b\nc\n", MACHINE_INDEX="1")
    assert found[0] == "torchrun"
    assert [after(found, o) for o in ("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr")] == [
        "2",
        "8",
        "1",
        "a",
    ]
    if engine == "torchtitan":
        assert found[found.index("-m") :] == [
            "-m",
            "torchtitan.train",
            "--module",
            "titan_config",
            "--config",
            "planned",
        ]


def test_accelerate_gets_rank_and_address(tmp_path: Path) -> None:
    found = started(plan("70b", "fsdp2", dp=16), tmp_path, MASTER_ADDR="10.0.0.1", MACHINE_INDEX="1")
    assert [after(found, o) for o in ("--machine_rank", "--main_process_ip")] == ["1", "10.0.0.1"]


def test_a_hostfile_starts_all_machines_by_ssh(tmp_path: Path) -> None:
    made = plan("70b", dp=16)
    (tmp_path / "hostfile").write_text("a slots=8\nb slots=8\n")
    found = started(made, tmp_path)
    assert found[0] == "deepspeed"
    assert [after(found, o) for o in ("--num_nodes", "--num_gpus")] == ["2", "8"]
    assert render(made)["hostfile.example"].count("slots=8") == 2


def test_launch_says_what_is_missing(tmp_path: Path) -> None:
    write_files(plan("70b", dp=16), tmp_path, targets=("train",))
    env = {"PATH": os.defpath}
    done = subprocess.run(["bash", str(tmp_path / WORDS)], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "set DATASET" in done.stderr) == (2, True)
    done = subprocess.run(
        ["bash", str(tmp_path / WORDS)], env=env | {"DATASET": "x"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "set MACHINE_INDEX" in done.stderr) == (2, True)


NAMES = ["a; touch hacked", "$(touch hacked)", "`touch hacked`", "x' 'y", 'q"; touch hacked; "', "../up/$HOME"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2", "megatron_bridge"])
def test_hostile_names_stay_one_word(name: str, engine: str, tmp_path: Path) -> None:
    base = plan(engine=engine, zero_stage=3)
    made = replace(base, model=replace(base.model, hf_id=name))
    found = started(made, tmp_path)
    if engine != "megatron_bridge":
        assert after(found, "--model") == name
    assert not (tmp_path / "hacked").exists()
    assert json.loads(render(made)["train_settings.json"])["model"] == name
    for document in yaml.safe_load_all(render(made)["kubernetes.yaml"]):
        assert isinstance(document, dict)


@pytest.mark.parametrize("name", ["", "  ", "-rf", "a\nb", "a\x00b", "a\u2028b"])
def test_names_that_break_lines_are_refused(name: str) -> None:
    base = plan()
    with pytest.raises(InvalidValueError):
        render(replace(base, model=replace(base.model, hf_id=name, name=name)))
    if name.strip():
        with pytest.raises(InvalidValueError):
            render(plan(offers=(offer(instance_type=name),)))
        with pytest.raises(InvalidValueError):
            render(plan(method="lora", lora_targets=(name,)))


def test_overrides_reach_every_process_as_options(tmp_path: Path) -> None:
    found = started(plan(), tmp_path, MICRO_BATCH_SIZE="2", GRADIENT_ACCUMULATION_STEPS="8", CHECKPOINT_INTERVAL="1")
    options = ("--micro-batch-size", "--gradient-accumulation-steps", "--checkpoint-interval")
    assert [after(found, o) for o in options] == ["2", "8", "1"]
    assert not set(options) & set(started(plan(), tmp_path))

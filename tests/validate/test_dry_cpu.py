"""The dry run of plans for CPU devices takes off what a CPU process holds, not CUDA's context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.cli.main import run
from planner.engines.training import framework
from planner.models.load import load_model
from planner.plan import load_plan
from planner.space.hardware_classes import HardwareClass
from planner.validate.dry import dry_run, planned_states_gib, planned_tensors_gib
from planner.validate.planned import planned_gpu
from tests.calibrate.cpu import TINY, folder
from tests.train_runs.runs import need

SMALL = TINY | {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 12, "num_key_value_heads": 6,
    "vocab_size": 8192,
}  # fmt: skip
JOB = [
    "--task",
    "train",
    "--tokens",
    "100k",
    "--seq-len",
    "256",
    "--global-batch",
    "8seq",
    "--checkpoint-interval",
    "0",
]


def planned(where: Path, stack: str, stage: int) -> Path:
    (where / "tiny").mkdir(exist_ok=True)
    (where / "tiny/config.json").write_text(json.dumps(SMALL))
    folder(where / "mine")
    out = where / f"{stack}-{stage}"
    words = ["solve", "--catalog", str(where / "mine"), "--on", "2xthis-cpu", "--model", str(where / "tiny"), *JOB]
    assert run([*words, "--framework", stack, "--zero-stage", str(stage), "--dp", "2", "--out", str(out)]) == 0
    return out / "plan.yaml"


@pytest.mark.parametrize(("stack", "stage"), [("fsdp2", 3), ("deepspeed", 2)])
def test_planned_tensors_use_the_constants_of_the_cpu(stack: str, stage: int, tmp_path: Path) -> None:
    plan = load_plan(planned(tmp_path, stack, stage))
    gpu, catalog = planned_gpu(plan, plan.deployment)
    cpu, cuda = framework(stack).on(gpu), framework(stack)
    n = cpu.number
    assert n("context_gib") != cuda.number("context_gib")
    machine = HardwareClass(gpu, 2, catalog.links[gpu.default_link], None, ())
    heap = planned_states_gib(load_model(plan.request["model"]), plan.deployment, plan.deployment.train, machine)[
        "heap"
    ]
    assert heap > 0, "activations stay in the heap while the optimizer runs"
    expected = (plan.memory.total_gib - n("context_gib") - n("nccl_gib")) / (1 + n("fragmentation")) - heap
    assert planned_tensors_gib(cpu, plan.deployment, plan.memory, heap) == pytest.approx(expected)
    assert 0 < expected < 1.6  # two buckets of 1 GB are allocated, as much of them is written as the model has


@need("torch", "transformers")
@pytest.mark.parametrize(("stack", "stage"), [("fsdp2", 3), ("deepspeed", 2), ("deepspeed", 3)])
def test_the_count_agrees(stack: str, stage: int, tmp_path: Path) -> None:
    found = {p.name: p for p in dry_run(load_plan(planned(tmp_path, stack, stage))).parts}
    judged = {name: p.error_percent for name, p in found.items() if p.judged and name != "the rest of the peak"}
    assert judged == pytest.approx(dict.fromkeys(judged, 0.0), abs=5)


def test_a_catalog_that_lost_the_device_is_told(tmp_path: Path, capsys: Any) -> None:
    plan = planned(tmp_path, "fsdp2", 3)
    plan.write_text(plan.read_text().replace("gpu: this-cpu", "gpu: that-cpu"))
    capsys.readouterr()
    assert run(["validate", str(plan)]) == 2
    assert "that-cpu" in capsys.readouterr().err

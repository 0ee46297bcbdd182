"""The emitted files really train: two processes, gloo, a tiny random Llama. Slow ones: pytest -m slow tests/train_runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.train_emit.plans import owned, tiny
from tests.train_runs.runs import emit, environment, need, read, start

hugging_face = need("torch", "transformers", "accelerate")
deepspeed = need("torch", "transformers", "accelerate", "deepspeed")
BF16 = {"precision": "bf16"}


def check(run: Any, wrapper: str, data_parallel: int, steps: int = 8, fall: float = 0.5) -> None:
    assert run.code == 0, run.text[-3000:]
    first = run.starts[0]
    seen = (first["wrapper"], first["world_size"], first["data_parallel"], first["global_batch_size"])
    assert seen == (wrapper, 2, data_parallel, 4 * data_parallel)
    assert [row["step"] for row in run.steps] == list(range(1, steps + 1))
    assert run.losses[-1] < run.losses[0] - fall
    for row in run.steps:
        assert row["tokens_per_s"] == pytest.approx(4 * data_parallel * 64 / row["step_time_s"])
        assert row["tokens_per_s_per_gpu"] == pytest.approx(row["tokens_per_s"] / 2)
        assert row["peak_host_gib"] > 0.1


@hugging_face
def test_ddp_trains_and_goes_on_where_it_stopped(tiny_folder: Path, tmp_path: Path) -> None:
    """The fast real run of the default test set."""
    plan = tiny("fsdp2", zero_stage=0, **BF16)
    check(start(plan, tiny_folder, tmp_path), "DistributedDataParallel", 2)
    again = start(plan, tiny_folder, tmp_path, EXTRA_ARGS="--cpu --learning-rate 1e-2 --steps 10")
    assert again.code == 0, again.text[-3000:]
    assert [s["step"] for s in again.starts] == [0, 8]
    assert [row["step"] for row in again.steps] == list(range(1, 11))
    assert again.losses[8] < again.losses[0] - 0.5
    assert (tmp_path / "output/final/model.safetensors").exists()


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "zero0": ("DeepSpeedEngine", 2, {"zero_stage": 0}),
    "zero1": ("DeepSpeedEngine", 2, {"zero_stage": 1, "checkpoint_interval": 1, "packing": False}),
    "zero2-bf16": ("DeepSpeedEngine", 2, {"zero_stage": 2, **BF16}),
    "zero3": ("DeepSpeedEngine", 2, {"zero_stage": 3}),
    "zero3-groups-of-3": ("DeepSpeedEngine", 2, {"zero_stage": 3, "checkpoint_interval": 3, "chunked_loss": True}),
    "zero2-offload": ("DeepSpeedEngine", 2, {"zero_stage": 2, "offload": "optimizer", **BF16}),
    "zero3-offload": ("DeepSpeedEngine", 2, {"zero_stage": 3, "offload": "optimizer+parameters"}),
    "zero2-bf16-states": ("DeepSpeedEngine", 2, {"zero_stage": 2, "optimizer": "adamw-bf16", **BF16}),
    "zero1-muon": ("DeepSpeedEngine", 2, {"zero_stage": 1, "optimizer": "muon", **BF16}),
    "zero3-lora": ("DeepSpeedEngine", 2, {"zero_stage": 3, "method": "lora", "checkpoint_interval": 1, **BF16}),
    "autotp": ("DeepSpeedEngine", 1, {"zero_stage": 1, "tp": 2, "dp": 1}),
    "pipeline": ("PipelineEngine", 1, {"zero_stage": 0, "pp": 2, "dp": 1}),
    "pipeline-uneven": (
        "PipelineEngine", 1,
        {"zero_stage": 1, "pp": 2, "dp": 1, "layers_per_stage": (3, 1), "checkpoint_interval": 2, "chunked_loss": True, **BF16},
    ),
    "fsdp3": ("FSDPModule", 2, {"engine": "fsdp2", "zero_stage": 3}),
    "fsdp2-bf16-states": ("FSDPModule", 2, {"engine": "fsdp2", "zero_stage": 2, "optimizer": "adamw-bf16", **BF16}),
    "fsdp3-checkpoints": ("FSDPModule", 2, {"engine": "fsdp2", "zero_stage": 3, "checkpoint_interval": 1, **BF16}),
    "fsdp3-groups-of-2": ("FSDPModule", 2, {"engine": "fsdp2", "zero_stage": 3, "checkpoint_interval": 2, "chunked_loss": True}),
    "fsdp3-lora": ("FSDPModule", 2, {"engine": "fsdp2", "zero_stage": 3, "method": "lora", "checkpoint_interval": 1, **BF16}),
    "ddp-adafactor": ("DistributedDataParallel", 2, {"engine": "fsdp2", "zero_stage": 0, "optimizer": "adafactor"}),
}  # fmt: skip


@pytest.mark.slow
@deepspeed
@pytest.mark.parametrize("name", CASES)
def test_the_loss_falls(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    wrapper, data_parallel, settings = CASES[name]
    if settings.get("method") == "lora":
        pytest.importorskip("peft")
    fall = 0.5 if settings.get("method", "full") == "full" else 0.3
    check(start(tiny(**settings), tiny_folder, tmp_path), wrapper, data_parallel, fall=fall)


@pytest.mark.slow
@deepspeed
@need("peft", "bitsandbytes")
@pytest.mark.parametrize(
    "settings", [{"engine": "fsdp2", "zero_stage": 0}, {"engine": "fsdp2", "zero_stage": 3}, {"zero_stage": 2}]
)
def test_qlora(settings: dict[str, Any], tiny_folder: Path, tmp_path: Path) -> None:
    plan = tiny(method="qlora", checkpoint_interval=1, **settings, **BF16)
    wrapper = {("fsdp2", 0): "DistributedDataParallel", ("fsdp2", 3): "FSDPModule"}.get(
        (settings.get("engine"), settings["zero_stage"]), "DeepSpeedEngine"
    )
    check(start(plan, tiny_folder, tmp_path), wrapper, 2, fall=0.3)


@pytest.mark.slow
@deepspeed
@pytest.mark.parametrize("name", ["zero3", "fsdp3", "pipeline"])
def test_a_resumed_run_continues_from_its_step(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Stopped after 4 of 8 steps and started again, it repeats the losses of a run that never stopped."""
    plan = tiny(**CASES[name][2])
    whole = start(plan, tiny_folder, tmp_path / "whole")
    half = start(
        plan, tiny_folder, tmp_path / "half", EXTRA_ARGS="--cpu --learning-rate 1e-2 --save-every 4 --stop-at 4"
    )
    assert half.code == 0, half.text[-3000:]
    assert [row["step"] for row in half.steps] == [1, 2, 3, 4]
    rest = start(plan, tiny_folder, tmp_path / "half")
    assert [s["step"] for s in rest.starts] == [0, 4]
    assert [row["step"] for row in rest.steps] == list(range(1, 9))
    assert rest.losses == pytest.approx(whole.losses, rel=2e-3)


@pytest.mark.slow
@deepspeed
def test_all_ways_of_sharding_compute_the_same(tiny_folder: Path, tmp_path: Path) -> None:
    plans = {f"zero{stage}": tiny(zero_stage=stage) for stage in range(4)} | {
        f"fsdp{stage}": tiny("fsdp2", zero_stage=stage) for stage in (0, 2, 3)
    }
    losses = {name: start(plan, tiny_folder, tmp_path / name).losses for name, plan in plans.items()}
    for name, found in losses.items():
        assert found == pytest.approx(losses["fsdp0"], rel=5e-3), name


@pytest.mark.slow
@deepspeed
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_two_machines(engine: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Two launchers, as on two machines, that meet at MASTER_ADDR."""
    emit(tiny(engine, zero_stage=2, offers=(owned("rtx-4090", 1, 2),)), tmp_path)
    env = environment(tiny_folder, OUTPUT_DIR=str(tmp_path / "output"), HOSTS="127.0.0.1 127.0.0.1")
    started = [
        subprocess.Popen(["bash", str(tmp_path / "launch.sh")], env=env | {"MACHINE_INDEX": i}, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for i in ("0", "1")
    ]  # fmt: skip
    texts = [process.communicate(timeout=300)[0] for process in started]
    check(
        read(max(p.returncode for p in started), tmp_path, "".join(texts)),
        "DeepSpeedEngine" if engine == "deepspeed" else "FSDPModule",
        2,
    )


@pytest.mark.slow
@hugging_face
def test_torchrun_without_accelerates_launcher(tiny_folder: Path, tmp_path: Path) -> None:
    check(start(tiny("fsdp2", zero_stage=3), tiny_folder, tmp_path, LAUNCHER="torchrun"), "FSDPModule", 2)


OUT_OF_MEMORY = """
import os, torch
if os.environ.get("FILL_MEMORY") == "1":
    plain, calls = torch.nn.Embedding.forward, []
    def forward(self, ids):
        calls.append(1)
        if len(calls) > 3 and ids.shape[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return plain(self, ids)
    torch.nn.Embedding.forward = forward
"""


@pytest.mark.slow
@hugging_face
def test_out_of_memory_names_a_plan_that_works(tiny_folder: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(OUT_OF_MEMORY)
    env = {"PYTHONPATH": str(site), "FILL_MEMORY": "1"}
    plan = tiny("fsdp2", zero_stage=0)
    failed = start(plan, tiny_folder, tmp_path / "run", **env)
    assert failed.code != 0
    assert "OUT OF MEMORY on rank" in failed.text
    wanted = "NEXT: half the micro-batch: MICRO_BATCH_SIZE=1 GRADIENT_ACCUMULATION_STEPS=4 bash launch.sh"
    assert wanted in failed.text
    assert "Traceback" not in failed.text.split("OUT OF MEMORY")[0]
    settings = dict(word.split("=") for word in wanted.split() if "=" in word)
    check(start(plan, tiny_folder, tmp_path / "again", **env, **settings), "DistributedDataParallel", 2)


@pytest.mark.slow
@deepspeed
def test_a_silent_fallback_ends_the_run(tiny_folder: Path, tmp_path: Path) -> None:
    """With this variable accelerate leaves DeepSpeed out and runs DDP; the script sees it before the first step."""
    run = start(tiny(zero_stage=2), tiny_folder, tmp_path, ACCELERATE_USE_CPU="true")
    assert run.code != 0
    assert "this is not the plan" in run.text
    assert run.steps == []


@pytest.mark.slow
@hugging_face
def test_another_number_of_processes_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    emit(tiny("fsdp2", zero_stage=0), tmp_path)
    text = (tmp_path / "train_settings.json").read_text()
    (tmp_path / "train_settings.json").write_text(json.dumps(json.loads(text) | {"world_size": 16}))
    env = environment(tiny_folder, OUTPUT_DIR=str(tmp_path / "output"), LAUNCHER="torchrun")
    done = subprocess.run(
        ["bash", str(tmp_path / "launch.sh")], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert "the plan is for 16 processes, 2 were started" in done.stderr

"""The frameworks' own parsers accept the emitted files of random plans, and refuse what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.emit import render, write_files
from tests.train_emit.plans import owned, plan
from tests.train_runs.runs import emit, need

ROOT = Path(__file__).parents[2]
SEARCH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
all_parsers = need("torch", "transformers", "accelerate", "deepspeed")


def result(module: str, *words: str, timeout: int = 600) -> Any:
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", f"tests.train_runs.{module}", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@all_parsers
def test_parsers_accept_200_random_plans() -> None:
    found = result("parse_plans", "0", "200")
    assert found["complaints"] == []
    assert min(found["counts"][parser] for parser in ("deepspeed", "accelerate", "transformers")) >= 30


@all_parsers
def test_the_parsers_do_refuse(tmp_path: Path) -> None:
    """A test of the test: a wrong key in a nested block of DeepSpeed, a wrong top key of accelerate."""
    code = (
        "import json,sys; from tests.train_runs.parse_plans import deepspeed_config, accelerate_config; from pathlib import Path\n"
        "for check in (lambda: deepspeed_config(Path(sys.argv[1]), 1), lambda: accelerate_config(Path(sys.argv[2]))):\n"
        "    try: check()\n"
        "    except Exception as error: print('REFUSED', type(error).__name__)\n"
    )
    config = json.loads(render(plan(dp=1))["ds_config.json"])
    config["zero_optimization"]["stage3_prefech_bucket_size"] = 1
    (tmp_path / "ds.json").write_text(json.dumps(config))
    tree = yaml.safe_load(render(plan(engine="fsdp2"))["accelerate.yaml"]) | {"num_procesess": 2}
    (tmp_path / "acc.yaml").write_text(yaml.safe_dump(tree))
    words = [sys.executable, "-c", code, str(tmp_path / "ds.json"), str(tmp_path / "acc.yaml")]
    env = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.count("REFUSED") == 2, done.stdout + done.stderr


BIG: list[dict[str, Any]] = [
    {"zero_stage": 0},
    {"zero_stage": 1, "accumulation": 8},
    {"zero_stage": 2, "micro": 2},
    {"zero_stage": 3, "micro": 2, "accumulation": 3},
    {"zero_stage": 3, "precision": "fp32"},
    {"zero_stage": 2, "optimizer": "adamw-bf16"},
    {"zero_stage": 2, "offload": "optimizer"},
    {"zero_stage": 3, "offload": "optimizer+parameters"},
]


@pytest.mark.slow
@all_parsers
@pytest.mark.parametrize("settings", BIG, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_64_ranks_pass_deepspeed_initialize(settings: dict[str, Any], tmp_path: Path) -> None:
    made = plan("70b", dp=64, **settings)
    found = result("fake_world", str(emit(made, tmp_path)))
    rows = settings.get("micro", 1) * settings.get("accumulation", 4) * 64
    expected = {"world": 64, "train_batch": rows, "stage": settings["zero_stage"], "data_parallel": 64, "steps": 2}
    assert {key: found[key] for key in expected} == expected
    assert found["offload"] == ("offload" in settings)
    assert found["optimizer"] == ("DeepSpeedCPUAdam" if "offload" in settings else "AdamW")


@pytest.mark.slow
@need("torchtitan", "triton")
def test_torchtitan_reads_its_configuration() -> None:
    found = result("titan_plans", "0", "100")
    assert found["complaints"] == []
    assert found["read"] >= 8


@pytest.mark.slow
@need("megatron.bridge", "megatron.core")
def test_megatron_bridge_reads_its_configuration() -> None:
    """Its ConfigContainer, model provider and TransformerConfig, packages that need a GPU being stood in for."""
    found = result("megatron_plans", "0", "400")
    assert found["complaints"] == []
    assert found["read"] >= 50
    assert found["uneven"] >= 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("shellcheck", path=SEARCH) is None, reason="not installed: shellcheck")
def test_shellcheck_is_content(tmp_path: Path) -> None:
    for i, made in enumerate(
        [
            plan(),
            plan(engine="fsdp2"),
            plan("70b", dp=16),
            plan("70b", "fsdp2", dp=16),
            plan("70b", "torchtitan", tp=8, dp=2),
        ]
    ):
        names = [str(p) for p in write_files(made, tmp_path / str(i)) if p.suffix in (".sh", ".slurm")]
        done = subprocess.run(
            [str(shutil.which("shellcheck", path=SEARCH)), "-s", "bash", *names],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == ""


@pytest.mark.slow
@need("kubernetes_validate")
def test_kubernetes_objects_are_valid() -> None:
    import kubernetes_validate

    for made in (plan(), plan(engine="fsdp2", offers=(owned("rtx-4090", 8),)), plan("70b", dp=16)):
        for document in yaml.safe_load_all(render(made)["kubernetes.yaml"]):
            checked = document
            if document["kind"] == "JobSet":  # its controller makes plain Jobs of this
                spec = document["spec"]["replicatedJobs"][0]["template"]["spec"]
                checked = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "workers-0"}, "spec": spec}
            kubernetes_validate.validate(checked, "1.33", strict=True)

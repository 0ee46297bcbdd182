"""Feeds emitted files to the frameworks' own parsers: python -m tests.train_runs.parse_plans FIRST LAST.

In a process of its own, as the frameworks keep global state. Prints one JSON object: plans read per parser, and complaints.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from planner.emit import write_files
from tests.train_emit.plans import random_plan


def load(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def deepspeed_config(path: Path, data_parallel: int) -> None:
    """DeepSpeed's own class, told of the planned data-parallel size."""
    from deepspeed.runtime.config import DeepSpeedConfig

    class Ranks:
        def get_data_parallel_world_size(self) -> int:
            return data_parallel

        def get_model_parallel_world_size(self) -> int:
            return 1

    config = json.loads(path.read_text())
    read = DeepSpeedConfig(dict(config), mpu=Ranks())
    assert read.train_batch_size == config["train_batch_size"]
    assert int(read.zero_config.stage) == config["zero_optimization"]["stage"]
    assert read.gradient_clipping == config["gradient_clipping"]
    assert read.bfloat16_config.enabled == config.get("bf16", {}).get("enabled", False)
    assert read.float16_config.enabled == config.get("fp16", {}).get("enabled", False)


def accelerate_config(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    read = load_config_from_file(str(path))
    assert str(read.distributed_type).split(".")[-1] in ("FSDP", "MULTI_GPU")


def training_arguments(out: Path, dep: Any) -> None:
    """The TrainingArguments that the emitted train.py makes, fp16 left out as CPUs have none."""
    sys.path.insert(0, str(out))
    for name in ("train_parts", "train"):
        sys.modules.pop(name, None)
    try:
        train = load(out / "train.py", "train")
    finally:
        sys.path.remove(str(out))
    plan = train.parts.read_json("train_settings.json")
    args = argparse.Namespace(**plan, output=str(out / "output"), cpu=True, fresh=False)
    made = train.training_arguments(args)
    assert made.per_device_train_batch_size == dep.train.micro_batch_size
    assert made.gradient_accumulation_steps == dep.train.gradient_accumulation_steps
    assert made.max_steps == dep.train.steps
    if dep.engine == "fsdp2" and dep.train.zero_stage:
        assert made.fsdp_plugin_args["reshard_after_forward"] == (dep.train.zero_stage == 3)
        assert made.fsdp_plugin_args["fsdp_version"] == 2


def main(first: int, last: int) -> None:
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
    }
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(random.randint(20000, 55000)),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
    }
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    counts: dict[str, int] = {}
    complaints: list[str] = []
    for seed in range(first, last):
        made = random_plan(random.Random(seed))
        dep = made.deployment
        assert dep is not None
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            names = {p.name for p in write_files(made, out, targets=("train",))}
            work = {}
            if "ds_config.json" in names:
                work["deepspeed"] = lambda o=out, d=dep: deepspeed_config(o / "ds_config.json", d.data_parallel)
            if "accelerate.yaml" in names:
                work["accelerate"] = lambda o=out: accelerate_config(o / "accelerate.yaml")
            if names & {"ds_config.json", "accelerate.yaml"} and dep.pipeline_parallel == 1:
                work["transformers"] = lambda o=out, d=dep: training_arguments(o, d)
            for parser, check in work.items():
                counts[parser] = counts.get(parser, 0) + 1
                try:
                    check()
                except BaseException as error:
                    complaints.append(f"plan {seed}, {parser}: {type(error).__name__}: {error}"[:400])
    print("RESULT " + json.dumps({"counts": counts, "complaints": complaints}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

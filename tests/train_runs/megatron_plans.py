"""Megatron Bridge's own classes read the emitted script and settings: python -m tests.train_runs.megatron_plans FIRST LAST.

The model is a small one with the planned number of layers, made from a config.json; nothing is loaded or trained.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from planner.emit import write_files
from planner.plan import Deployment, Plan
from tests.train_emit.plans import MODELS, random_plan
from tests.train_runs import gpu_stand_ins


def write_model(folder: Path, plan: Plan, dep: Deployment) -> None:
    """A config.json with widths that 8 tensor ranks divide."""
    from transformers import LlamaConfig, Qwen3MoeConfig

    assert dep.train is not None
    layers = sum(dep.train.layers_per_stage or ()) or next(
        m.layers for m in MODELS.values() if m.params_total == plan.model.params_total
    )
    sizes: dict[str, Any] = {
        "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 64, "num_key_value_heads": 64,
        "num_hidden_layers": layers, "vocab_size": 4096, "max_position_embeddings": 1 << 17,
    }  # fmt: skip
    moe = dep.expert_parallel > 1
    config = Qwen3MoeConfig(num_experts=64, **sizes) if moe else LlamaConfig(**sizes)
    config.architectures = ["Qwen3MoeForCausalLM" if moe else "LlamaForCausalLM"]
    config.save_pretrained(folder)


def check(plan: Plan, dep: Deployment, folder: Path) -> None:
    """The emitted script builds its ConfigContainer, which Megatron Bridge completes and validates for the planned ranks."""
    from megatron.bridge.training.config import runtime_config_update

    train = dep.train
    assert train is not None
    write_files(plan, folder, targets=("train",))
    write_model(folder / "model", plan, dep)
    os.environ |= {
        "MODEL": str(folder / "model"), "OUTPUT_DIR": str(folder), "DATASET": "mock", "WORLD_SIZE": str(dep.gpus), "RANK": "0",
    }  # fmt: skip
    config = runpy.run_path(str(folder / "megatron_train.py"))["planned"]()
    runtime_config_update(config)
    model = config.model
    assert config.data_parallel_size == dep.data_parallel
    assert model.pipeline_model_parallel_size == dep.pipeline_parallel
    assert model.tensor_model_parallel_size == dep.tensor_parallel
    assert (config.train.train_iters, config.train.global_batch_size) == (train.steps, train.global_batch_size)
    assert config.ddp.use_distributed_optimizer == (train.zero_stage > 0)
    assert (model.bf16, model.fp16) == (dep.precision != "fp16", dep.precision == "fp16")
    if dep.pipeline_parallel > 1:
        assert str(model.pipeline_dtype) == ("torch.float16" if dep.precision == "fp16" else "torch.bfloat16")
    stages = train.layers_per_stage
    if stages and len(set(stages)) > 1:
        layout = model.pipeline_model_parallel_layout
        found = layout.layout if hasattr(layout, "layout") else layout
        assert [str(s).lower().count("decoder") for s in found] == list(stages)


def main(first: int, last: int) -> None:
    gpu_stand_ins.install()
    read, uneven, complaints = 0, 0, []
    for seed in range(first, last):
        made = random_plan(random.Random(seed))
        dep = made.deployment
        assert dep is not None
        assert dep.train is not None
        if dep.engine != "megatron_bridge":
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(made, dep, Path(folder))
                read += 1
                uneven += len(set(dep.train.layers_per_stage or ())) > 1
            except BaseException as error:
                complaints.append(f"plan {seed}: {type(error).__name__}: {error}"[:400])
    print("RESULT " + json.dumps({"read": read, "uneven": uneven, "complaints": complaints}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

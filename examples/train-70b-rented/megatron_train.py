#!/usr/bin/env python3
# Written by `planner emit`; edits are lost when it runs again.
"""Training with Megatron Bridge. DATASET is the prefix of a preprocessed .bin/.idx pair, or `mock` for random tokens."""

import json
import os
from pathlib import Path

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

PLAN = json.loads((Path(__file__).resolve().parent / "train_settings.json").read_text("utf-8"))


def put(target, values):
    """Sets fields that exist; a name this version does not know is an error."""
    for name, value in values.items():
        if not hasattr(target, name):
            raise SystemExit(f"{type(target).__name__} of this Megatron Bridge has no {name}")
        setattr(target, name, value)


def planned():
    """The plan as a ConfigContainer."""
    model, output = os.environ["MODEL"], os.environ["OUTPUT_DIR"]
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained(model).to_megatron_provider(load_weights=True)
    for part, values in PLAN["megatron"].items():
        put(getattr(cfg, part), values)
    if PLAN["pipeline_parallel"] > 1:
        cfg.model.pipeline_dtype = torch.bfloat16
    cfg.mixed_precision = PLAN["megatron_precision"]
    put(cfg.tokenizer, {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": model})
    put(cfg.checkpoint, {"save": f"{output}/checkpoints", "load": f"{output}/checkpoints"})
    put(cfg.logger, {"log_interval": 1, "tensorboard_dir": f"{output}/tensorboard"})
    if os.environ["DATASET"] != "mock":
        cfg.dataset.blend = ([os.environ["DATASET"]], None)
    return cfg


if __name__ == "__main__":
    pretrain(planned(), forward_step)

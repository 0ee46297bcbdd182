"""A CPU catalog folder without measuring: the texts that `planner calibrate` would write for round figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from planner.validate.calibrate.files import Measured, catalog_files, write
from planner.validate.calibrate.grid import Point, coarse_first
from planner.validate.calibrate.group import SIZES
from planner.validate.calibrate.machine import Machine

CONSTANTS = {
    "kernel_floor_us": 15.0, "streaming_floor_us": 70.0, "streaming_efficiency": 0.2, "launch_us": 450.0, "elementwise_factor": 0.9,
    "attention_backward": 2.4, "attention_backward_efficiency": 1.0, "head_passes": 5.0, "optimizer_efficiency": 0.6,
}  # fmt: skip
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def machine(devices: int = 2) -> Machine:
    return Machine("cpu", devices, "a processor", 1, 12e9, 8 * 2**30, None, "torch 2.13")


def measured(devices: int = 2) -> Measured:
    points = {
        kernel: [Point(at, 0.5) for at, _ in coarse_first(kernel)[::7]]
        for kernel in ("gemm", "prefill_attention", "decode_attention")
    }
    link = {
        "all_gather": [(float(s), 3e-4 + s / 2 / 0.6e9) for s in SIZES],
        "all_reduce": [(float(s), 3e-4 + s / 2 / 0.6e9) for s in SIZES],
        "reduce_scatter": [(float(s), 6e-4 + s / 0.6e9) for s in SIZES],
    }
    return Measured(4e10, 1e10, {"bf16": 2e11, "fp32": 9e10}, CONSTANTS, points, link if devices > 1 else {})


def folder(path: Path, name: str = "this-cpu", devices: int = 2) -> Path:
    write(path, catalog_files(name, machine(devices), measured(devices), "a100"))
    return path


__all__ = ["CONSTANTS", "TINY", "folder", "machine", "measured", "np"]

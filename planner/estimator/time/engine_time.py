"""Engine constants of time.yaml as arrays over engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from planner.engines.records import EngineSpec
from planner.errors import UnknownNameError
from planner.estimator.time.surfaces import FloatArray, IntArray, read_data

EXPERT_FAMILIES = ("vllm", "sglang", "trtllm", "marlin", "deepgemm")
"""Whose kernels run experts. marlin: vLLM's kernel for 16-bit activations and four-bit weights of any kind. deepgemm: the grouped product of vLLM
0.11 to 0.13 for weights in blocks of 8 bits on Hopper: each expert has a block of 128 rows of its own, loaded even when it is empty."""
SOLVED_FAMILIES = EXPERT_FAMILIES[:3]
"""Those that the engines of a plan run unasked."""
ATTENTION_FAMILIES = ("vllm", "sglang", "trtllm")
"""Whose kernels run the attention of decode steps."""
EXPERTS_OF = " with experts of "
"""Between a generation and a family: that generation with kernels of another family, as replayed runs may have set."""


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = read_data("planner.engines", "time.yaml")
    return data


def timing_row(name: str, version: str) -> dict[str, Any]:
    """The constants of an engine; a version named as a generation (say '2023') picks it, any other means today's. See EXPERTS_OF."""
    table = _data()["engines"]
    if name not in table:
        raise UnknownNameError("engine", name, table)
    generation, _, experts = version.partition(EXPERTS_OF)
    row: dict[str, Any] = table[name].get(generation) or table[name]["today"]
    if "variant_of" in row:
        row = {**table[name][row["variant_of"]], **row}
    return {**row, "expert_kernels": experts} if experts else row


@dataclass(frozen=True)
class EngineTiming:
    """Columns over E engines: seconds per step, per sequence and step, per request, per launch; graphs; whether prompts are prefilled before a decode step; efficiencies; quantises_apart: 1 where
    activations are quantised by kernels of their own; whose
    kernels run the experts (index into EXPERT_FAMILIES) and the attention of decode steps (into ATTENTION_FAMILIES)."""

    step_s: FloatArray
    sequence_s: FloatArray
    request_s: FloatArray
    launch_s: FloatArray
    graphs: FloatArray
    prefill_first: FloatArray
    decode_efficiency: FloatArray
    prefill_efficiency: FloatArray
    static: FloatArray
    family: IntArray
    attention: IntArray
    quantises_apart: FloatArray


def engine_timing(engines: Sequence[EngineSpec]) -> EngineTiming:
    """Constants of E engines."""
    rows = [timing_row(e.constants, e.version) for e in engines]

    def column(name: str, scale: float = 1.0) -> FloatArray:
        return np.array([float(r[name]) * scale for r in rows])

    return EngineTiming(
        step_s=column("step_overhead_us", 1e-6),
        sequence_s=column("per_sequence_us", 1e-6),
        request_s=column("request_overhead_ms", 1e-3),
        launch_s=column("launch_us", 1e-6),
        graphs=column("cuda_graphs"),
        prefill_first=column("prefill_first"),
        decode_efficiency=column("decode_efficiency"),
        prefill_efficiency=column("prefill_efficiency"),
        static=np.array([float(e.batching == "static") for e in engines]),
        family=np.array([EXPERT_FAMILIES.index(r["expert_kernels"]) for r in rows], dtype=np.int64),
        attention=np.array([ATTENTION_FAMILIES.index(r["attention_kernels"]) for r in rows], dtype=np.int64),
        quantises_apart=column("quantises_apart"),
    )

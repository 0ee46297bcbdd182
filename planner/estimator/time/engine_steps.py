"""Steps of an engine, from the step table and its constants: a decode step, what prompt tokens add to it, a whole batch's prefill."""

from __future__ import annotations

import numpy as np

from planner.estimator.time.engine_time import EngineTiming
from planner.estimator.time.steps import StepTable
from planner.estimator.time.surfaces import FloatArray, IntArray


def decode_step_s(
    table: StepTable, timing: EngineTiming, shard: IntArray, engine: IntArray, sequences: FloatArray
) -> FloatArray:
    """Step that decodes `sequences` sequences and prefills nothing; each pipeline stage holds its share of them.

    Whatever the engine's fitted efficiency, reading the active weights once is the floor.
    """
    part = sequences / table.pipeline[shard]
    kernels = (
        table.tokens_time_s(shard, timing.family[engine], part) + table.decode_time_s(shard, part)
    ) / timing.decode_efficiency[engine]
    kernels = np.maximum(kernels, table.floor_s[shard])
    eager = table.kernels[shard] * timing.launch_s[engine] * (1 - timing.graphs[engine])
    return np.asarray(np.maximum(kernels, eager) + timing.step_s[engine] + timing.sequence_s[engine] * sequences)


def mixed_extra_s(
    table: StepTable, timing: EngineTiming, shard: IntArray, engine: IntArray, load: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """What `chunk` prompt tokens add to a step with `sequences` decoders (load = sequences, chunk), per pass of the pipeline."""
    part = load[0] / table.pipeline[shard]
    more = table.tokens_time_s(shard, timing.family[engine], part + load[1]) - table.tokens_time_s(
        shard, timing.family[engine], part
    )
    return np.asarray(
        (np.maximum(more, 0.0) + load[1] * table.prefill_attention_s[shard]) / timing.prefill_efficiency[engine]
    )


def batch_prefill_s(
    table: StepTable, timing: EngineTiming, shard: IntArray, engine: IntArray, load: tuple[FloatArray, float]
) -> FloatArray:
    """Prefill of a whole batch (load = sequences, prompt tokens) in one pass, launched kernel by kernel."""
    batch, tokens = load
    stages = table.pipeline[shard]
    work = (
        table.tokens_time_s(shard, timing.family[engine], batch * tokens / stages)
        + batch * tokens / stages * table.prefill_attention_s[shard]
    )
    kernels = work / timing.prefill_efficiency[engine]
    eager = table.kernels[shard] * timing.launch_s[engine]
    return np.asarray(np.maximum(kernels, eager) + timing.step_s[engine] + timing.sequence_s[engine] * batch)

"""Steps of an engine, from the step table and its constants: a decode step, what prompt tokens add to it, a whole batch's prefill."""

from __future__ import annotations

import numpy as np

from planner.estimator.time.engine_time import EngineTiming
from planner.estimator.time.steps import StepTable
from planner.estimator.time.surfaces import FloatArray, IntArray

LEAST_CHUNK = (
    16.0  # prompt tokens that a step takes at the least: a floor of the model, so that a full step is never none
)


def _tokens_s(
    table: StepTable, timing: EngineTiming, shard: IntArray, engine: IntArray, tokens: FloatArray
) -> FloatArray:
    """Token-wise work of the engine's kernels, with the quantisation of activations where it does not fuse it."""
    time = table.tokens_time_s(shard, timing.family[engine], tokens)
    if not timing.quantises_apart.any():
        return time
    return np.asarray(time + timing.quantises_apart[engine] * table.quantising_time_s(shard, tokens))


def decode_step_s(
    table: StepTable, timing: EngineTiming, shard: IntArray, engine: IntArray, sequences: FloatArray
) -> FloatArray:
    """Step that decodes `sequences` sequences and prefills nothing; each pipeline stage holds its share of them.

    Whatever the engine's fitted efficiency, reading the active weights once is the floor.
    """
    part = sequences / table.pipeline[shard]
    kernels = (
        _tokens_s(table, timing, shard, engine, part) + table.decode_time_s(shard, timing.attention[engine], part)
    ) / timing.decode_efficiency[engine]
    kernels = np.maximum(kernels, table.floor_s[shard])
    eager = table.kernels[shard] * timing.launch_s[engine] * (1 - timing.graphs[engine])
    return np.asarray(np.maximum(kernels, eager) + timing.step_s[engine] + timing.sequence_s[engine] * sequences)


def mixed_extra_s(
    table: StepTable,
    timing: EngineTiming,
    at: tuple[IntArray, IntArray],
    load: tuple[FloatArray, FloatArray, float],
    step: FloatArray,
) -> FloatArray:
    """What `chunk` tokens of prompts of `prompt` tokens add to a step of `step` seconds with `sequences` decoders (at = shard, engine; load =
    sequences, chunk, prompt), per pass of the pipeline.

    A prompt is one attention group's alone: with G groups the step lasts as long as that of the fullest, of max(chunk / G, min(prompt, chunk))
    prompt tokens, and the feed-forward of all as long as for the whole chunk.
    A step with prompt tokens is no CUDA graph: it takes at least kernels x launch and the engine's overhead. An engine that prefills first
    spends such a step on the prompts alone, and the decoders wait for all of it.
    """
    shard, engine = at
    apart = timing.prefill_first[engine]
    part, chunk = load[0] / table.pipeline[shard] * (1 - apart), load[1]
    alone = _tokens_s(table, timing, shard, engine, part) * (1 - apart)
    more = _tokens_s(table, timing, shard, engine, part + chunk) - alone
    fullest = np.maximum(chunk, table.groups[shard] * np.minimum(chunk, load[2]))
    if np.any(fullest > chunk):
        more = more + table.group_time_s(shard, part + fullest) - table.group_time_s(shard, part + chunk)
    kernels = (np.maximum(more, 0.0) + fullest * table.prefill_attention_s[shard]) / timing.prefill_efficiency[engine]
    eager, any_prompt = table.kernels[shard] * timing.launch_s[engine], chunk > 0
    own = np.maximum(kernels, eager) + timing.step_s[engine]
    mixed = np.maximum(kernels, eager + timing.step_s[engine] + timing.sequence_s[engine] * load[0] - step)
    return np.asarray(np.where(any_prompt, np.where(apart > 0, own, mixed), 0.0))


def batch_prefill_s(
    table: StepTable, timing: EngineTiming, shard: IntArray, engine: IntArray, load: tuple[FloatArray, float]
) -> FloatArray:
    """Prefill of a whole batch (load = sequences, prompt tokens) in one pass, launched kernel by kernel."""
    batch, tokens = load
    stages = table.pipeline[shard]
    each = batch * tokens / stages
    work = _tokens_s(table, timing, shard, engine, each) + each * table.prefill_attention_s[shard]
    kernels = work / timing.prefill_efficiency[engine]
    eager = table.kernels[shard] * timing.launch_s[engine]
    return np.asarray(np.maximum(kernels, eager) + timing.step_s[engine] + timing.sequence_s[engine] * batch)

"""Step times of many replicas on a small grid, once: everything later interpolates this table by row.

A step that decodes N sequences and prefills c prompt tokens takes  tokenwise(N + c) + decode(N) + c * prefill_attention_per_token
summed over all pipeline stages; the engine adds its own overhead (serving.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.estimator.time.all_reduce import switch_reduce
from planner.estimator.time.collectives import all_gather_s, fabric, p2p_s
from planner.estimator.time.engine_time import ATTENTION_FAMILIES, SOLVED_FAMILIES
from planner.estimator.time.kernels import Devices, devices, gemm_s, streaming_s
from planner.estimator.time.layers import (
    ACTIVATION_BYTES,
    Cut,
    group_tokenwise_s,
    kernels_per_layer,
    layer_tokenwise_s,
    mixer_decode_s,
    mixer_prefill_s,
    quantising_s,
)
from planner.estimator.time.surfaces import FloatArray, IntArray, surface_of
from planner.models.spec import ModelSpec
from planner.request import Workload
from planner.space.shard import Shard

TOKEN_GRID_LOG2, BATCH_GRID_LOG2 = 15, 13  # 1 .. 16384 tokens, 1 .. 4096 sequences


@dataclass(frozen=True)
class StepTable:
    """Times of S shards. tokenwise_s (F S, 15) over 2^0..2^14 tokens, family after family of expert kernels (F = 1 without experts); decode_s (3 S, 13) over 2^0..2^12 sequences (attention over the
    cache at the mean context, output head, sampling), one after the other of ATTENTION_FAMILIES; prefill_attention_s (S,) per prompt token; kernels (S,) launched a step.

    groups (S,): attention groups of a replica, each with its own sequences; group_s (S, 15): what a group does token by token for its share of
    the tokens, part of tokenwise_s.
    pipeline (S,): stages, each working on its own microbatch of the step. borrowed (S,): surfaces of another GPU.
    floor_s (S,): weight_read_s, below which no decode step can be. quantising_s (S, 15): quantisation of activations, for engines that do not
    fuse it into other kernels.
    """

    tokenwise_s: FloatArray
    decode_s: FloatArray
    prefill_attention_s: FloatArray
    kernels: FloatArray
    pipeline: FloatArray
    borrowed: IntArray
    floor_s: FloatArray
    quantising_s: FloatArray
    groups: FloatArray
    group_s: FloatArray

    def tokens_time_s(self, shard: IntArray, family: IntArray, tokens: FloatArray) -> FloatArray:
        """Token-wise time of a microbatch of `tokens` tokens on shard rows; linear in tokens between the grid points.

        family: whose expert kernels run, an index into engine_time.EXPERT_FAMILIES; of no account without experts.
        """
        count = len(self.pipeline)
        row = shard + count * family if len(self.tokenwise_s) > count else shard
        return _lookup(self.tokenwise_s, row, tokens)

    def quantising_time_s(self, shard: IntArray, tokens: FloatArray) -> FloatArray:
        """Quantisation of the activations of a microbatch of `tokens` tokens."""
        return _lookup(self.quantising_s, shard, tokens)

    def group_time_s(self, shard: IntArray, tokens: FloatArray) -> FloatArray:
        """Token-wise work of an attention group when a microbatch of `tokens` tokens is spread evenly over the groups."""
        return _lookup(self.group_s, shard, tokens)

    def decode_time_s(self, shard: IntArray, family: IntArray, sequences: FloatArray) -> FloatArray:
        """Attention, head and sampling of a microbatch of `sequences` sequences by the kernels of a family, an index into ATTENTION_FAMILIES."""
        return _lookup(self.decode_s, shard + len(self.pipeline) * family, sequences)


def _lookup(table: FloatArray, row: IntArray, x: FloatArray) -> FloatArray:
    """Table (S, G) over 2^0..2^(G-1) at row and x (same shape), linear in x; below 1 as at 1, beyond the end extended."""
    _, exponent = np.frexp(np.maximum(x, 1.0))
    low = np.minimum(exponent - 1, table.shape[1] - 2)
    start = np.ldexp(1.0, low)
    flat = row * table.shape[1] + low
    cells = table.ravel()
    left = cells[flat]
    return np.asarray(left + (np.maximum(x, 1.0) / start - 1) * (cells[flat + 1] - left))


def cut_of(shards: Sequence[Shard], dev: Devices) -> Cut:
    """How the shards are cut, without expert kernels and with the first family's attention."""
    ranks = [s.tensor_parallel for s in shards]
    attention = [max(1, s.tensor_parallel // s.attention_data_parallel) for s in shards]
    links = [s.tensor_link for s in shards]
    surfaces = [surface_of(s.gpu).surface for s in shards]
    return Cut(
        dev=dev,
        tensor=np.array(ranks, dtype=float),
        attention=np.array(attention, dtype=float),
        experts=np.array([s.expert_parallel for s in shards], dtype=float),
        tensor_group=fabric(links, ranks),
        tensor_reduce=switch_reduce(surfaces, links, ranks),
        attention_reduce=switch_reduce(surfaces, links, attention),
        moe_stack=None,
        decode_stack=dev.decode(ATTENTION_FAMILIES[0]),
    )


def _head_s(model: ModelSpec, cut: Cut, sequences: FloatArray) -> FloatArray:
    """Output head and sampler: GEMM of vocab / TP x hidden, gather of the logits, three passes over fp32 logits."""
    part = np.ceil(model.vocab / cut.tensor)
    full = np.full_like(part, float(model.hidden))
    logits = sequences * model.vocab
    time = gemm_s(cut.dev, sequences, part, full, cut.dev.quantises_head)
    return np.asarray(
        time + all_gather_s(cut.tensor_group, logits * ACTIVATION_BYTES) + streaming_s(cut.dev, logits * 4.0 * 3, 4.0)
    )


def _weight_read_s(model: ModelSpec, cut: Cut) -> FloatArray:
    """Least time of a decode step (S,): every active weight read once at the peak bandwidth,
    (body bytes + head bytes) / (TP x bytes/s), all stages in turn. The head counts 16 bit where the precision leaves it alone."""
    body = sum(layer.active_params(model.hidden) * n for layer, n in model.layer_groups)
    head = model.vocab * model.hidden * np.where(cut.dev.quantises_head > 0, cut.dev.weight_bytes, ACTIVATION_BYTES)
    return np.asarray((body * cut.dev.weight_bytes[:, 0] + head[:, 0]) / (cut.tensor * cut.dev.bandwidth[:, 0]))


def weight_read_s(model: ModelSpec, shard: Shard) -> float:
    """Least time of a decode step of one replica, in s: all active weights once at the peak memory bandwidth."""
    return float(_weight_read_s(model, cut_of([shard], devices([shard])))[0])


def _tokenwise_s(cut: Cut, model: ModelSpec, tokens: FloatArray) -> FloatArray:
    """Token-wise work of all layers, (S, 15)."""
    total: FloatArray = np.zeros((1, 1))
    for layer, count in model.layer_groups:
        total = total + count * layer_tokenwise_s(cut, layer, model.hidden, tokens)
    return total


def step_table(
    model: ModelSpec, shards: Sequence[Shard], workload: Workload, families: Sequence[str] = SOLVED_FAMILIES
) -> StepTable:
    """Step times of every shard (S of them) for the model at the workload's mean context input + output / 2 tokens.

    Stages of a pipeline are summed (a token passes all of them) and weighted by the fullest stage: ceil(L / PP) PP / L.
    """
    dev = devices(shards)
    cut = cut_of(shards, dev)
    tokens, batches = np.exp2(np.arange(TOKEN_GRID_LOG2))[None, :], np.exp2(np.arange(BATCH_GRID_LOG2))[None, :]
    context = workload.input_tokens + workload.output_tokens / 2
    stages = np.array([s.pipeline_parallel for s in shards], dtype=float)
    layers = len(model.layers)
    uneven = (np.ceil(layers / stages) * stages / max(layers, 1))[:, None]

    attention = [replace(cut, decode_stack=dev.decode(family)) for family in ATTENTION_FAMILIES]
    decode: FloatArray = np.zeros((1, 1))
    prefill: FloatArray = np.zeros((1, 1))
    kernels = np.full(len(shards), 8.0)
    quantised = np.array([float(s.precision.bits <= 8 and not s.precision.weight_only) for s in shards])
    for layer, count in model.layer_groups:
        plain, more = kernels_per_layer(layer)
        kernels = kernels + count * (plain + quantised * more)
        for mixer in layer.mixers:
            by_family = [mixer_decode_s(c, mixer, batches, context) for c in attention]
            decode = decode + count * np.concatenate(by_family)
            prefill = prefill + count * mixer_prefill_s(cut, mixer, float(workload.input_tokens))
    hops = fabric([s.pipeline_link for s in shards], [min(2, s.pipeline_parallel) for s in shards])
    message = tokens * model.hidden * ACTIVATION_BYTES
    embed = streaming_s(dev, 2 * message, 1.0) + cut.tensor_reduce.time_s(message)
    shift = embed + (stages[:, None] - 1) * p2p_s(hops, message)
    kinds = families if model.is_moe else ()
    cuts = [replace(cut, moe_stack=dev.moe(f), every_expert=f == "deepgemm") for f in kinds] or [cut]
    tokenwise = np.concatenate([_tokenwise_s(c, model, tokens) * uneven + shift for c in cuts])
    every = (len(attention), 1)
    decode = decode * np.tile(uneven, every) + np.tile(_head_s(model, cut, batches), every)
    groups = cut.tensor / cut.attention
    quantising: FloatArray = np.zeros((len(shards), TOKEN_GRID_LOG2))
    grouped: FloatArray = np.zeros((len(shards), TOKEN_GRID_LOG2))
    for layer, count in model.layer_groups:
        quantising = quantising + count * quantising_s(cut, layer, model.hidden, tokens)
        if np.any(groups > 1):
            grouped = grouped + count * group_tokenwise_s(cut, layer, model.hidden, tokens)
    return StepTable(
        tokenwise_s=np.maximum.accumulate(np.asarray(tokenwise), axis=1),
        decode_s=np.maximum.accumulate(np.asarray(decode), axis=1),
        prefill_attention_s=np.asarray(prefill * uneven)[:, 0] / workload.input_tokens / groups,
        kernels=kernels,
        pipeline=stages,
        borrowed=dev.borrowed.astype(np.int64),
        floor_s=_weight_read_s(model, cut),
        quantising_s=quantising * uneven,
        groups=groups,
        group_s=np.maximum.accumulate(grouped * uneven, axis=1),
    )

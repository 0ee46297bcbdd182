"""A prompt through llama.cpp's layer split: micro-batches, one after the other, over GPUs that hold a share of the layers each.

One host thread launches everything in order. It overlaps GPUs only as far as it gets ahead of them: a launch waits while a GPU has a full
queue, and a micro-batch waits for the one four before it (ggml-org/llama.cpp#6017, #19042).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import InvalidValueError
from planner.estimator.time.collectives import fabric, p2p_s
from planner.estimator.time.ggml import micro_batch_s, prompt_kernels_of, read_ggml
from planner.models.spec import ModelSpec
from planner.space.shard import Shard


@dataclass(frozen=True)
class Host:
    """What the launching thread is bound by: seconds a kernel, kernels a GPU's queue holds, micro-batches in flight."""

    kernel_s: float
    queue: float
    copies: int


class _Stage:
    """What one GPU has run: start and end of each micro-batch of `kernels` kernels."""

    def __init__(self, kernels: float) -> None:
        self.kernels = kernels
        self.spans: list[tuple[float, float]] = []

    def ran_s(self, count: float) -> float:
        """When `count` of its kernels, micro-batch after micro-batch, had run; 0 for none."""
        if count <= 0:
            return 0.0
        whole = min(int(count / self.kernels), len(self.spans) - 1)
        start, end = self.spans[whole]
        return start + min(count / self.kernels - whole, 1.0) * (end - start)

    def free_s(self) -> float:
        """When its last micro-batch ended."""
        return self.spans[-1][1] if self.spans else 0.0


def pipeline_s(batches: Sequence[float], stages: int, kernels: float, hop_s: float, host: Host) -> float:
    """Time until the last of `batches` (seconds each over all GPUs) left the last of `stages` GPUs with `kernels` kernels each.

    start(u, s) = max(launched(u, s), end(u - 1, s), end(u, s - 1) + hop); end = start + batch / stages, not before the host has
    launched the last kernel: for launch number x, GPU s must have run x - queue. On one GPU a micro-batch is launched after the one before
    it ended (its inputs have one copy).
    """
    gpus = [_Stage(kernels) for _ in range(stages)]
    ahead = host.copies if stages > 1 else 1
    clock = 0.0
    for number, batch in enumerate(batches):
        arrived = 0.0
        for gpu in gpus:
            if number >= ahead:
                clock = max(clock, gpu.spans[number - ahead][1])
            start = max(clock, gpu.free_s(), arrived)
            gpu.spans.append((start, start + batch / stages))
            clock = max(clock + kernels * host.kernel_s, gpu.ran_s((number + 1) * kernels - host.queue))
            gpu.spans[-1] = (start, max(gpu.spans[-1][1], clock))
            arrived = gpu.free_s() + hop_s
    return gpus[-1].free_s()


def prompt_s(model: ModelSpec, shard: Shard, tokens: int, micro_batch: int) -> float:
    """Prefill of one prompt of `tokens` tokens in micro-batches of `micro_batch`, seconds: pipeline_s of micro_batch_s. A hop sends a
    micro-batch's hidden states. InvalidValueError for tensor parallelism, which a layer split has none of."""
    if shard.tensor_parallel > 1:
        raise InvalidValueError(
            "llama.cpp is modelled with whole layers on each GPU",
            "tensor parallelism is 1 there",
            "Use pipeline stages.",
        )
    n, stages = read_ggml(), shard.pipeline_parallel
    sizes = [min(micro_batch, tokens - done) for done in range(0, tokens, micro_batch)]
    reach = np.cumsum(sizes)
    batches = [micro_batch_s(model, shard, size, float(end)) for size, end in zip(sizes, reach, strict=True)]
    sent = np.array([[max(sizes) * model.hidden * n["boundary_bytes"]]])
    hop_s = float(p2p_s(fabric([shard.pipeline_link], [min(2, stages)]), sent)[0, 0])
    host = Host(n["host_us"] * 1e-6, n["launch_queue"], int(n["copies"]))
    return pipeline_s(batches, stages, prompt_kernels_of(model, shard) / stages, hop_s, host)

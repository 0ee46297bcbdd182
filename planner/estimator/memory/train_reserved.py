"""What the allocator and the process hold above the bytes of live tensors, as torch's reserved memory and nvidia-smi show them.

    reserved = peak + c (peak - states) + k head + pools, within what the GPU offers; c is more with whole logits than with a chunked loss
    process  = reserved + CUDA context + communicators

Constants cached_* of engines/training.yaml. A plan's peak has `fragmentation` instead, since the allocator gives its cache back before it fails.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.engines.training import Framework
from planner.estimator.memory.train_states import PLAIN_BYTES
from planner.estimator.memory.training import TrainMemory
from planner.models.spec import ModelSpec
from planner.request import TrainJob
from planner.space.train_rows import TrainRows
from planner.units import GIB

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of each row: live tensors at the peak, with the allocator's cache, and CUDA context with communicators."""

    allocated: FloatArray
    reserved: FloatArray
    context: FloatArray

    @property
    def process(self) -> FloatArray:
        """What nvidia-smi shows while the GPU has room for it."""
        return np.asarray(self.reserved + self.context)


def process_memory(
    model: ModelSpec, job: TrainJob, framework: Framework, rows: TrainRows, memory: TrainMemory
) -> ProcessMemory:
    """Reserved and process memory of each row; equation in the module's docstring. The cache ends where the GPU does."""
    n, allocated = framework.number, memory.peak_bytes - memory.runtime_bytes
    context = GIB * (n("context_gib") + np.where(rows.world > 1, n("nccl_gib"), 0.0))
    head = PLAIN_BYTES * model.vocab * model.hidden / rows.tensor_parallel
    moving = np.maximum(allocated - memory.steady_bytes, 0.0)
    share = n("cached_share") + (0.0 if job.chunked_loss else n("cached_logits_share"))
    cache = share * moving + n("cached_head_copies") * head + n("cached_gib") * GIB
    reserved = np.maximum(allocated, np.minimum(allocated + cache, memory.usable_bytes - context))
    return ProcessMemory(np.asarray(allocated), np.asarray(reserved), np.asarray(context))

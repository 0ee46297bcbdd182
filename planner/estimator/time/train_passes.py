"""Passes over gradients and states that are no matrix product: around reductions, around and in the optimizer step; fresh memory.

    t = bytes moved / (memory bandwidth * efficiency) + fresh bytes * first touch

Fresh: what is allocated for the purpose in blocks that the process gets from the system each time (fresh_from_bytes). Bytes per
parameter: training.yaml, counted in each framework's source. Both terms check with page faults and profiles on CPUs
(benchmarks/cpu_loop.py).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planner.engines.training import Framework, host_link_gb_per_s
from planner.estimator.memory.train_states import train_state_bytes
from planner.hardware.records import Gpu
from planner.request import TrainJob
from planner.space.train_rows import IntArray, TrainRows
from planner.units import GB

FloatArray = npt.NDArray[np.float64]


def fresh_s(framework: Framework, fresh_bytes: npt.ArrayLike, block_bytes: npt.ArrayLike) -> FloatArray:
    """Seconds of the first touch of `fresh_bytes` allocated in blocks of `block_bytes`: bytes * first_touch_s_per_gb."""
    n = framework.number
    again = np.asarray(block_bytes) >= n("fresh_from_bytes")
    return np.asarray(np.asarray(fresh_bytes, dtype=float) * again * n("first_touch_s_per_gb") / GB)


def streamed_s(gpu: Gpu, framework: Framework, moved_bytes: npt.ArrayLike) -> FloatArray:
    """Seconds to read and write `moved_bytes` of states or gradients: bytes / (bandwidth * optimizer_efficiency)."""
    rate = gpu.bandwidth_gb_per_s * GB * framework.number("optimizer_efficiency")
    return np.asarray(np.asarray(moved_bytes, dtype=float) / rate)


def reduce_passes_s(
    gpu: Gpu, framework: Framework, zero: IntArray, params: FloatArray, bucket: FloatArray
) -> FloatArray:
    """Seconds that one reduction of the gradients of `params` parameters spends beside the collective, in buckets of `bucket`."""
    n = framework.number
    flat = n("reduce_fresh_bytes")
    own = np.where(zero < 3, n("bucket_fresh_bytes"), 0.0)
    fresh = fresh_s(framework, flat * params, flat * bucket) + fresh_s(framework, own * params, own * bucket)
    return np.asarray((streamed_s(gpu, framework, n("reduce_moved_bytes") * params) + fresh) * (zero > 0))


def optimizer_s(job: TrainJob, gpu: Gpu, framework: Framework, rows: TrainRows, owned: FloatArray) -> FloatArray:
    """The step on the GPU streams every state in and out once, with the framework's passes around it; paged moments cross the
    host link. owned: parameters of the rank."""
    n, per = framework.number, train_state_bytes(job, framework)
    moved = 2 * per.optimizer + per.gradients + per.weights
    around = np.where(rows.data_parallel * rows.context_parallel > 1, n("step_moved_bytes"), 0.0) * (
        rows.zero_stage > 0
    )
    stream = streamed_s(gpu, framework, (moved + around) * owned)
    fresh = fresh_s(framework, n("step_fresh_bytes") * owned, 4.0 * owned) * (rows.zero_stage > 0)
    paged = 2 * per.host * owned / (host_link_gb_per_s(gpu) * GB)
    return np.asarray(np.where(rows.offload > 0, 0.0, stream + fresh + paged) + n("step_overhead_s"))

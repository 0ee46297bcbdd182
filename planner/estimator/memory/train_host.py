"""Host memory of training: offloaded states, and the checkpoint while it is loaded."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planner.engines.training import Framework
from planner.estimator.memory.train_states import (
    PLAIN_BYTES,
    QLORA_PRECISION,
    adapter_params,
    rank_params,
    train_state_bytes,
)
from planner.models.spec import ModelSpec
from planner.request import TrainJob
from planner.space.hardware_classes import HardwareClass
from planner.space.train_rows import TrainRows

FloatArray = npt.NDArray[np.float64]


def host_bytes(model: ModelSpec, job: TrainJob, hw: HardwareClass, framework: Framework, rows: TrainRows) -> FloatArray:
    """Host memory of one machine: offloaded states with pinned buffers, or the checkpoint while it is loaded.

    Offloaded states of all ranks of the machine = bytes per parameter * P / machines * host_factor. 4-bit weights that
    FSDP2 shards are whole in the host memory of every process first: processes of the machine * bytes of the 4-bit model.
    """
    per, n = train_state_bytes(job, framework), framework.number
    total = float(model.params_total)
    trainable = total if job.method == "full" else sum(adapter_params(model, job, g) * c for g, c in model.layer_groups)
    base = 0.0 if job.method == "full" else PLAIN_BYTES * total * (0.3 if job.method == "qlora" else 1.0)
    machines = np.maximum(1.0, np.ceil(rows.world / hw.gpus_per_node))
    kept = per.optimizer + per.gradients - np.where(rows.zero_stage == 3, n("stage3_saving_bytes"), 0.0)
    states = np.where(rows.offload > 0, kept + np.where(rows.offload == 2, per.weights, 0.0), 0.0) * trainable
    states = states + np.where(rows.offload == 2, base, 0.0) + per.host * trainable
    local = np.minimum(rows.world, hw.gpus_per_node)
    if job.method == "qlora":  # where 4-bit weights stay whole they are made on the GPU, tensor by tensor
        on_host = (rows.zero_stage >= 2) & (n("quantised_on_host") > 0)
        load = np.where(on_host, local * quantised_model_bytes(model, job), PLAIN_BYTES * total)
    else:
        copies = np.where((rows.zero_stage < 3) & (n("load_all_ranks") > 0), local, 1)
        each = (per.weights if job.method == "full" else PLAIN_BYTES) * total
        load = copies * each / (rows.pipeline_parallel * rows.tensor_parallel)
    return np.asarray(np.maximum(n("host_factor") * states / machines, load))


def quantised_model_bytes(model: ModelSpec, job: TrainJob) -> float:
    """Bytes of the whole model with its layers in 4 bit, embedding and head in 16."""
    one = np.ones(1, dtype=np.int64)
    params = rank_params(model, one, one, job.frozen_precision or QLORA_PRECISION)
    counts = np.array([n for _, n in model.layer_groups], dtype=float)
    ends = params.embedding[0] + (0.0 if model.tie_embeddings else params.head[0])
    return float((counts * params.layer_bytes[0]).sum() + PLAIN_BYTES * ends)

"""Cost of a training run: steps * step time * price of all machines."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from planner.request import TrainJob

FloatArray = npt.NDArray[np.float64]


def run_steps(job: TrainJob, sequences_per_step: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Optimizer steps of the whole run: ceil(tokens / (sequences_per_step * seq_len))."""
    per_step = np.asarray(sequences_per_step, dtype=float) * job.seq_len
    return np.asarray(np.ceil(job.tokens / per_step - 1e-9), dtype=np.int64)


def run_time_s(steps: npt.ArrayLike, step_time_s: npt.ArrayLike) -> FloatArray:
    """Seconds of the whole run, without start-up, evaluation and checkpoints written to disk."""
    return np.asarray(np.asarray(steps, dtype=float) * np.asarray(step_time_s, dtype=float))


def run_cost_usd(run_s: npt.ArrayLike, usd_per_hour: npt.ArrayLike) -> FloatArray:
    """USD of the whole run on machines that cost usd_per_hour together."""
    return np.asarray(np.asarray(run_s, dtype=float) / 3600.0 * np.asarray(usd_per_hour, dtype=float))


def hours_for(tokens: float, tokens_per_s: float) -> float:
    """Hours to train `tokens` tokens at a steady rate; inf when the rate is 0."""
    return tokens / tokens_per_s / 3600.0 if tokens_per_s > 0 else math.inf

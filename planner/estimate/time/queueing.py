"""Waiting: how long a request waits for its prefill, for a slot, or for a running batch to end.

All formulas take arrays. Checked against a discrete-event simulation in tests/time.
"""

from __future__ import annotations

import numpy as np

from planner.estimate.time.surfaces import FloatArray

QUANTILE = 0.95


def excess_wait_s(utilisation: FloatArray, service_s: FloatArray) -> FloatArray:
    """Mean wait behind others beyond the job in progress: M/D/1 less its residual, rho^2 S / (2 (1 - rho)). inf at rho >= 1."""
    rho = np.minimum(utilisation, 1 - 1e-9)
    return np.asarray(rho * rho * service_s / (2 * (1 - rho)))


def slot_wait_s(utilisation: FloatArray, slots: FloatArray, stay_s: FloatArray) -> FloatArray:
    """Mean wait for one of `slots` places: Sakasegawa's M/M/c form stay / c * u^(sqrt(2 (c + 1)) - 1) / (1 - u).

    Source: H. Sakasegawa, An approximation formula L_q = a rho^b / (1 - rho), Ann. Inst. Statist. Math. 29 (1977).
    """
    u = np.minimum(utilisation, 1 - 1e-9)
    return np.asarray(stay_s / slots * u ** (np.sqrt(2 * (slots + 1)) - 1) / (1 - u))


def tail_s(mean_s: FloatArray, probability: FloatArray, quantile: float = QUANTILE) -> FloatArray:
    """Quantile of a wait that is 0 with 1 - probability and else exponential, with the given mean over all.

    P(W > t) = p exp(-p t / mean)  ->  t = mean / p * ln(p / (1 - q)), 0 when p <= 1 - q.
    """
    p = np.clip(probability, 1e-9, 1.0)
    return np.asarray(mean_s / p * np.log(np.maximum(p / (1 - quantile), 1.0)))


def wave_wait_s(turnaround_s: float, step_s: FloatArray, mixed_s: FloatArray, at_most_s: FloatArray) -> FloatArray:
    """Wait of a prompt when users with equal answer lengths stay in step.

    Groups that were prefilled in neighbouring steps finish one decode step apart; while the first of them turns around,
    turnaround / step more groups finish, and each costs a mixed step ahead in the queue: wait = turnaround / step * mixed.
    """
    return np.asarray(np.minimum(turnaround_s / step_s * mixed_s, at_most_s))


def peak(mean: FloatArray, sigmas: float = 2.33) -> FloatArray:
    """About the 99th percentile of a Poisson count of that mean: mean + 2.33 sqrt(mean) + 0.5, at least 1."""
    return np.asarray(np.maximum(np.ceil(mean + sigmas * np.sqrt(mean)), 1.0))

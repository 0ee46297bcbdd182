"""Waiting: how long a request waits for its prefill, for a slot, or for a running batch to end.

All formulas take arrays. Checked against a discrete-event simulation in tests/time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.estimator.time.surfaces import FloatArray

QUANTILE = 0.95


def excess_wait_s(utilisation: FloatArray, service_s: FloatArray) -> FloatArray:
    """Mean wait behind others beyond the job in progress: M/D/1 less its residual, rho^2 S / (2 (1 - rho)). inf at rho >= 1."""
    rho = np.minimum(utilisation, 1 - 1e-9)
    return np.asarray(rho * rho * service_s / (2 * (1 - rho)))


@dataclass(frozen=True)
class Prefill:
    """Prefill seen as a queue, arrays of one shape: decode step d, mean step E = TPOT, cost of a prompt to the others dP, a prompt's
    own prefill, probability that the engine is at work, load of a prefill that fills every step, that full step, and a prompt's
    share of the tokens a step takes (above 1: longer than a step)."""

    step_s: FloatArray
    mean_step_s: FloatArray
    cost_s: FloatArray
    own_s: FloatArray
    busy: FloatArray
    load: FloatArray
    full_step_s: FloatArray
    share: FloatArray


def prefill_wait_s(x: Prefill) -> tuple[FloatArray, FloatArray]:
    """Mean and 95th percentile of the wait of a prompt under Poisson arrivals, beyond its own prefill.

    Short prompts: steps form a gated queue, C' = d + dP Poisson(rate C), with rho = rate dP = 1 - d / E:
        E2 = E[C^2] = (d^2 + (2 d + dP) rho E) / (1 - rho^2);  wait = E2 / E (1/2 + rho)  (rest of the step, then co-arrivals),
    plus the M/D/1 excess of full steps, in proportion to a prompt's share of one. Long prompts: M/D/1 with the own prefill as service.
    """
    rho = np.clip(1 - x.step_s / x.mean_step_s, 0.0, 1 - 1e-9)
    second = (x.step_s**2 + (2 * x.step_s + x.cost_s) * rho * x.mean_step_s) / (1 - rho**2)
    biased = second / x.mean_step_s
    crowd = excess_wait_s(x.load, x.full_step_s) * np.minimum(x.share, 1.0)
    short = x.busy * biased / 2 + rho * biased + crowd
    sigma = np.sqrt(np.maximum(second - x.mean_step_s**2, 0.0))
    short_high = (QUANTILE * x.busy + rho) * (biased + 2 * sigma) + tail_s(crowd, x.load)
    queue = excess_wait_s(x.load, x.own_s)
    rest = (1 - x.load) * x.busy * x.step_s / 2 + x.load * x.own_s / 2
    long_high = QUANTILE * np.where(x.load > 1 - QUANTILE, x.own_s, x.busy * x.step_s) + tail_s(queue, x.load)
    mean = np.where(x.share > 1, rest + queue, short)
    return np.asarray(mean), np.asarray(np.maximum(np.where(x.share > 1, long_high, short_high), mean))


def closed_wait_s(x: Prefill) -> FloatArray:
    """Mean wait of a prompt when a fixed number of users send the next one after each answer.

    A prompt arrives when a step ends, so little of the running step is left (a quarter on average, for the client's delay);
    rho E is the work of others that finished with it. Long prompts: M/D/1 held to a load of 0.85, as the queue is finite.
    """
    rho = np.clip(1 - x.step_s / x.mean_step_s, 0.0, 1 - 1e-9)
    short = x.mean_step_s * (x.busy / 4 + rho)
    load = np.minimum(x.load, 0.85)
    return np.asarray(np.where(x.share > 1, load * x.own_s / 2 + excess_wait_s(load, x.own_s), short))


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

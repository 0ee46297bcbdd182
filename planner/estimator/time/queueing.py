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
    """Prefill seen as a queue, arrays of one shape: decode step d, cost of a prompt to the decoders dP, a prompt's own prefill, a step
    full of prompt tokens T, time S of such steps a prompt takes, its share of the tokens of one (above 1: longer than a step).
    steps: K = output tokens - 1."""

    step_s: FloatArray
    cost_s: FloatArray
    own_s: FloatArray
    full_step_s: FloatArray
    service_s: FloatArray
    share: FloatArray
    steps: float

    def long(self) -> FloatArray:
        """Weight 0..1 of "prompts follow one another" against "prompts share a step": the squared share of a step."""
        return np.asarray(np.minimum(self.share, 1.0) ** 2)


@dataclass(frozen=True)
class Load:
    """What an arriving prompt finds: rate of prompts per s, mean step E, probability that the engine is at work, share of time that
    prompts are being prefilled (rate S, at most 1)."""

    rate_per_s: FloatArray
    mean_step_s: FloatArray
    busy: FloatArray
    used: FloatArray


def second_moment_s2(x: Prefill, load: Load) -> FloatArray:
    """E[C^2] of steps C' = d + dP Poisson(rate C), a gated queue: (d^2 + (2 d + dP) rho E) / (1 - rho^2), rho = 1 - d / E."""
    rho = np.clip(1 - x.step_s / load.mean_step_s, 0.0, 1 - 1e-9)
    return np.asarray((x.step_s**2 + (2 * x.step_s + x.cost_s) * rho * load.mean_step_s) / (1 - rho**2))


def prefill_wait_s(x: Prefill, load: Load) -> tuple[FloatArray, FloatArray]:
    """Mean and 95th percentile of the wait of a prompt under Poisson arrivals, beyond its own prefill.

    Short prompts: steps form a gated queue, wait = E[C^2] / E (1/2 + rho) (rest of the step, then co-arrivals), plus the M/D/1
    excess of full steps, in proportion to a prompt's share of one. Long prompts: M/D/1 with the own prefill as service.
    """
    rho = np.clip(1 - x.step_s / load.mean_step_s, 0.0, 1 - 1e-9)
    second = second_moment_s2(x, load)
    biased = second / load.mean_step_s
    crowd = excess_wait_s(load.used, x.full_step_s) * np.minimum(x.share, 1.0)
    short = load.busy * biased / 2 + rho * biased + crowd
    sigma = np.sqrt(np.maximum(second - load.mean_step_s**2, 0.0))
    short_high = (QUANTILE * load.busy + rho) * (biased + 2 * sigma) + tail_s(crowd, load.used)
    queue = excess_wait_s(load.used, x.own_s)
    rest = (1 - load.used) * load.busy * x.step_s / 2 + load.used * x.own_s / 2
    in_service = x.own_s * np.maximum(
        1 - (1 - QUANTILE) / np.maximum(load.used, 1e-9), 0.0
    )  # uniform, with probability `used`
    long_high = np.maximum(in_service, QUANTILE * load.busy * x.step_s) + tail_s(queue, load.used)
    mean = np.where(x.share > 1, rest + queue, short)
    return np.asarray(mean), np.asarray(np.maximum(np.where(x.share > 1, long_high, short_high), mean))


def answer_step_s(x: Prefill, load: Load) -> FloatArray:
    """Mean step an answer sees (its TPOT) under Poisson arrivals, from the step after its own prefill on.

    Prompts that share a step: C' = d + dP Poisson(rate C) forgets its past as rho^k, so after the own step C0 = d + dP + rho E[C^2]/E
        TPOT = E + (C0 - E) rho (1 - rho^K) / ((1 - rho) K)
    Prompts longer than a step: runs of full steps T and of decode steps d take turns. Another prompt follows the own one with
    probability u = used, then a run lasts (1 + u / (2 (1 - u))) / (1 - u) prompts (M/D/1 after a departure); pi = share of steps in runs:
        TPOT = d + (T - d) (pi + (u - pi) (1 - exp(-c K)) / (c K)),   c = T / (S run) + rate d
    """
    k = x.steps
    rho = np.clip(1 - x.step_s / load.mean_step_s, 0.0, 1 - 1e-6)
    after = x.step_s + x.cost_s + rho * second_moment_s2(x, load) / load.mean_step_s
    shared = load.mean_step_s + (after - load.mean_step_s) * rho * (1 - rho**k) / ((1 - rho) * k)
    used = np.clip(load.used, 1e-9, 1 - 1e-6)
    run = (1 + used / (2 * (1 - used))) / (1 - used)
    forget = (x.full_step_s / (x.service_s * run) + load.rate_per_s * x.step_s) * k
    stationary = used * x.step_s / (used * x.step_s + (1 - used) * x.full_step_s)
    mixed = stationary + (used - stationary) * -np.expm1(-forget) / forget
    chunked = x.step_s + (x.full_step_s - x.step_s) * mixed
    weight = x.long()
    return np.asarray((1 - weight) * np.maximum(shared, load.mean_step_s) + weight * chunked)


def closed_wait_s(x: Prefill, load: Load, sequences: FloatArray, others: FloatArray) -> FloatArray:
    """Mean wait of a prompt beyond its own prefill when a fixed number of users send the next one after each answer.

    Answers end, and prompts arrive, N / K per step however long the step takes. So a prompt finds the engine in prefill with
    probability u = share N / K, the share of steps that are mixed, not the share of time. Long prompts: a closed queue of U users,
    Q = (sqrt(N^2 + 4 u N / (1 - u)) - N) / 2 of them in prefill, (U - 1) / U of them seen by the next (Schweitzer), half as
    much waiting as exponential services: S (Q / u - 1) / 2. Short prompts: a quarter of the running step, as a prompt comes when
    a step ends, and the prompts that came with it, rho E. others = (U - 1) / U: one user alone waits for nobody.
    Sources: P. Schweitzer, Approximate analysis of multiclass closed networks of queues (1979); M. Reiser, S. Lavenberg, JACM 27 (1980).
    """
    u = np.clip(load.used, 1e-9, 1 - 1e-4)
    inside = (np.sqrt(sequences**2 + 4 * u * sequences / (1 - u)) - sequences) / 2
    long = x.service_s * np.maximum(inside / u - 1, 0.0) / 2
    rho = np.clip(1 - x.step_s / load.mean_step_s, 0.0, 1 - 1e-9)
    short = load.mean_step_s * (load.busy / 4 * others + rho)
    weight = x.long()
    return np.asarray((1 - weight) * short + weight * long)


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

"""A benchmark of a set number of requests, sent at once or faster than the engine can take them: no steady state, so it is followed
from the first to the last request, as a fluid.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.errors import PlannerError
from planner.estimator.time.engine_steps import LEAST_CHUNK
from planner.estimator.time.surfaces import FloatArray

PARTS = 64  # of an answer's steps, followed together
MOST = 20_000  # parts of a run; it ends far earlier, and is refused where it does not


@dataclass(frozen=True)
class Arrivals:
    """R runs: requests/s (inf = all at once), requests in all, prompt tokens, output tokens, places for sequences (R,), prompt tokens of a
    step (R,), whether all answers are equally long (R,); otherwise their lengths are geometric."""

    rate_per_s: FloatArray
    count: float
    prompt: float
    output: float
    slots: FloatArray
    budget: FloatArray
    equal: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class FiniteRun:
    """Means over the requests of each run (R,): s to the first token without the request overhead, s per further token; output tokens/s until the last ends."""

    ttft_s: FloatArray
    tpot_s: FloatArray
    tokens_per_s: FloatArray


@dataclass
class _Fluid:
    """What is where, in requests (R,), the time, and the integrals of waiting and running over it; what started in each of the last parts."""

    now: FloatArray
    sent: FloatArray
    waiting: FloatArray
    running: FloatArray
    done: FloatArray
    waited: FloatArray
    ran: FloatArray
    started: deque[FloatArray]


def finite_run(
    decode_s: Callable[[FloatArray], FloatArray],
    extra_s: Callable[[FloatArray, FloatArray, FloatArray], FloatArray],
    arrivals: Arrivals,
) -> FiniteRun:
    """Follows the runs part by part: s decode steps with what prompts fit beside.

    decode_s(sequences), extra_s(sequences, prompt tokens, decode step) -> s, as of engine_steps.py. Equal answers end K = output - 1
    steps after they started; of geometric lengths with mean K, running / K end in a step. By Little's law TTFT = integral of waiting / count,
    TPOT = integral of running / (count K).
    """
    a, zero = arrivals, np.zeros(len(arrivals.slots))
    steps = max(a.output - 1.0, 1.0)
    at_once = np.isinf(a.rate_per_s)
    sent = np.where(at_once, a.count, np.minimum(1.0, a.count))
    parts = max(min(round(steps), PARTS), 1)
    x, stride = _Fluid(zero, sent, sent, zero, zero, zero, zero, deque([zero] * parts)), steps / parts
    for _ in range(MOST):
        if np.all(x.done > a.count - 0.5):
            break
        _advance(x, (decode_s, extra_s), a, (stride, steps))
    else:
        raise PlannerError(f"a run of {a.count:g} requests did not end within {MOST} parts")
    return FiniteRun(x.waited / a.count, x.ran / a.count / steps, a.count * a.output / x.now)


def _advance(
    x: _Fluid,
    engine: tuple[Callable[[FloatArray], FloatArray], Callable[[FloatArray, FloatArray, FloatArray], FloatArray]],
    a: Arrivals,
    part: tuple[float, float],
) -> None:
    """`stride` decode steps of every run that has not ended: dt = stride d(running) + extra of the prompts taken, in full steps."""
    stride, steps = part
    room = np.maximum(a.budget - x.running, LEAST_CHUNK)
    take = np.minimum(np.minimum(x.waiting, stride * room / a.prompt), np.maximum(a.slots - x.running, 0.0))
    tokens = take * a.prompt
    chunk = np.maximum(np.minimum(room, np.maximum(tokens, 1.0)), 1.0)
    step = engine[0](np.maximum(x.running, 1.0))
    open_ = x.done <= a.count - 0.5
    busy = np.maximum(np.minimum(x.running, 1.0), np.minimum(take, 1.0))
    dt = stride * step * busy + tokens / chunk * engine[1](np.maximum(x.running, 1.0), chunk, step)
    to_come = np.where(np.isinf(a.rate_per_s), np.inf, 1 / np.where(np.isinf(a.rate_per_s), 1.0, a.rate_per_s))
    dt = np.where(open_, np.where((busy < 1) & (x.sent < a.count), np.maximum(dt, np.minimum(to_come, 1e9)), dt), 0.0)
    come = np.where(np.isinf(a.rate_per_s), 0.0, np.minimum(dt / to_come, a.count - x.sent))
    end = np.where(
        open_, np.where(a.equal, x.started.popleft(), np.minimum(x.running * stride / steps, x.running)), 0.0
    )
    take = np.where(open_, take, 0.0)
    x.started.append(take)
    x.now = x.now + dt
    x.waited = x.waited + x.waiting * dt
    x.ran = x.ran + x.running * dt
    x.sent, x.waiting = x.sent + come, np.maximum(x.waiting + come - take, 0.0)
    x.running, x.done = x.running + take - end, x.done + end

"""A small discrete-event simulation of continuous batching with chunked prefill, to check the closed forms against.

One event is one step: all running sequences decode one token; waiting prompts fill what is left of the token budget, first come
first served; a prompt whose last chunk was in the step yields its first token at the step's end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np


@dataclass
class Result:
    ttft_s: np.ndarray
    tpot_s: np.ndarray
    running: float
    busy_s: float
    span_s: float


def simulate(step_s, arrivals, prompts, outputs, budget, slots=10**9, users=None, think_s=0.0):
    """step_s(sequences, prompt_tokens) -> seconds. Open loop: arrival times. Closed loop (users): arrivals are ignored, each of the
    `users` sends its next request think_s after its last token, until len(prompts) were sent."""
    total = len(prompts)
    if users is None:
        queue_in = deque(sorted((float(t), i) for i, t in enumerate(arrivals)))
        sent = total
    else:
        queue_in = deque((0.0, i) for i in range(min(users, total)))
        sent = len(queue_in)
    waiting: deque = deque()
    running: dict[int, int] = {}
    left = list(prompts)
    came, first, last = np.zeros(total), np.zeros(total), np.zeros(total)
    now, area, busy = 0.0, 0.0, 0.0
    done = 0
    while done < total:
        while queue_in and queue_in[0][0] <= now + 1e-12:
            t, i = queue_in.popleft()
            came[i] = t
            waiting.append(i)
        room, chunk, started = budget - len(running), 0, []
        while waiting and room > 0 and len(running) + len(started) < slots:
            take = min(room, left[waiting[0]])
            left[waiting[0]] -= take
            room, chunk = room - take, chunk + take
            if left[waiting[0]] > 0:
                break
            started.append(waiting.popleft())
        if not running and chunk == 0:
            now = queue_in[0][0]
            continue
        duration = step_s(len(running), chunk)
        area, busy, now = area + duration * len(running), busy + duration, now + duration
        finished = [i for i in running if running[i] <= 1]
        for i in running:
            running[i] -= 1
        for i in started:
            first[i] = now
            if outputs[i] <= 1:
                finished.append(i)
            else:
                running[i] = outputs[i] - 1
        for i in finished:
            running.pop(i, None)
            last[i] = now
            done += 1
            if users is not None and sent < total:
                queue_in.append((now + think_s, sent))
                sent += 1
    tpot = (last - first) / np.maximum(np.array(outputs) - 1, 1)
    return Result(first - came, tpot, area / now, busy, now)

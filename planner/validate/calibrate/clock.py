"""Timing of one piece of work on one device: the least of several runs, within a budget of seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LEAST_RUNS, MOST_RUNS = 3, 200


@dataclass(frozen=True)
class Device:
    """Where work runs: torch, the device's name for it ('cpu', 'cuda:0'), threads on a CPU, and what waits until it is done."""

    torch: Any
    name: str
    threads: int = 0

    @property
    def cuda(self) -> bool:
        """True on an accelerator."""
        return self.name.startswith("cuda")

    @property
    def now(self) -> Callable[[], float]:
        """The clock: wall time; of a single CPU thread its own time, which other programs on the machine do not change."""
        return time.thread_time if self.threads == 1 and not self.cuda else time.perf_counter

    def wait(self) -> None:
        """Until everything that was launched has ended."""
        if self.cuda:
            self.torch.cuda.synchronize()

    def random(self, *shape: int, dtype: Any) -> Any:
        """A tensor of that shape."""
        return self.torch.randn(*shape, dtype=self.torch.float32).to(dtype).to(self.name)


def shortest_s(device: Device, work: Callable[[], Any], budget_s: float) -> float:
    """Seconds of the fastest run: at least LEAST_RUNS after a warm-up, more while the budget lasts.

    On an accelerator several launches are timed together, so that the launch itself is hidden as it is inside a model.
    """
    work()
    device.wait()
    inner, best, runs = 1, float("inf"), 0
    if device.cuda:
        start = time.perf_counter()
        work()
        device.wait()
        inner = max(1, min(50, int(1e-3 / max(time.perf_counter() - start, 1e-6))))
    end, now = time.perf_counter() + budget_s, device.now
    while runs < LEAST_RUNS or (runs < MOST_RUNS and time.perf_counter() < end):
        start = now()
        for _ in range(inner):
            work()
        device.wait()
        best = min(best, (now() - start) / inner)
        runs += 1
    return best

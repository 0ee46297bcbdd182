"""What a load measured: percentiles, throughput, failures. Percentiles are linear between order statistics (NumPy)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.validate.engine_load import Sample

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Measured:
    """The samples of a load that were answered, and how many failed for which reason."""

    samples: tuple[Sample, ...]
    failures: dict[str, int]

    @property
    def answered(self) -> int:
        """Requests that got a whole answer."""
        return len(self.samples)

    @property
    def failed(self) -> int:
        """Requests that did not."""
        return sum(self.failures.values())

    def values_ms(self, name: str) -> list[float]:
        """All ttft, tpot or e2e of the answered requests, in ms."""
        found = [getattr(s, f"{name}_s") for s in self.samples]
        return [1e3 * v for v in found if v is not None]

    def table(self) -> dict[str, float]:
        """mean and percentiles of each latency (ms), throughput and mean lengths: the keys of `validation.measured`."""
        out: dict[str, float] = {}
        for name in ("ttft", "tpot", "e2e"):
            values = self.values_ms(name)
            if values:
                out[f"{name}_ms_mean"] = float(np.mean(values))
                out |= {f"{name}_ms_p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
        if self.samples:
            out["throughput_tokens_per_s"] = throughput_tokens_per_s(self.samples)
            out["input_tokens_mean"] = float(np.mean([s.input_tokens for s in self.samples]))
            out["output_tokens_mean"] = float(np.mean([s.output_tokens for s in self.samples]))
        return out


def measured_of(samples: Sequence[Sample]) -> Measured:
    """Answered and failed apart."""
    failures = Counter(s.error for s in samples if s.error)
    return Measured(tuple(s for s in samples if not s.error), dict(failures.most_common()))


def throughput_tokens_per_s(samples: Sequence[Sample]) -> float:
    """Output tokens per second while the load was whole: between one mean E2E after the first request and the last request.

    tokens of a request are spread evenly over its time; where that window is shorter than a mean E2E, all tokens over all time.
    """
    if not samples:
        return 0.0
    sent = np.array([s.sent_s for s in samples])
    ended = np.array([s.ended_s for s in samples])
    tokens = np.array([s.output_tokens for s in samples], dtype=np.float64)
    e2e = float(np.mean(ended - sent))
    low, high = float(sent.min()) + e2e, float(sent.max())
    if high - low < max(e2e, 1e-9):
        return float(tokens.sum() / max(float(ended.max() - sent.min()), 1e-9))
    inside = np.clip(np.minimum(ended, high) - np.maximum(sent, low), 0.0, None)
    return float((tokens * inside / np.maximum(ended - sent, 1e-9)).sum() / (high - low))

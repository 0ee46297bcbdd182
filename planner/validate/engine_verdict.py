"""Predicted beside measured, and whether each limit of the request held.

A limit on a percentile or a mean is judged at 80% confidence, as the plan's own intervals are: too few requests give
`cannot say`, not a lucky `held`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from planner.estimator.corrections import peak_range
from planner.plan import Plan, Range
from planner.units import format_duration
from planner.validate.engine_stats import Measured

CONFIDENCE_TAIL = 0.1  # each side of an 80% interval
NORMAL_QUANTILE = 1.2816  # of 1 - CONFIDENCE_TAIL
TTFT_PERCENTILE = 95  # docs/plan.md: ttft_ms is the 95th percentile, tpot_ms and e2e_ms are means
DIGITS = 4  # significant ones of the printed table
FAILURES_ALLOWED = 0.01  # above this share of failed requests a mean says nothing
Word = Literal["held", "did not hold", "cannot say"]
HELD: Word = "held"
BROKE: Word = "did not hold"
UNKNOWN: Word = "cannot say"


def shown(value: float) -> float:
    """As tables show it: a value that differs beyond these digits is not outside a range, though that be of no width."""
    return float(f"{value:.0f}" if abs(value) >= 10 ** (DIGITS - 1) else f"{value:.{DIGITS}g}")


@dataclass(frozen=True)
class Row:
    """One number predicted (with its 80% range where the plan has one, else the reason) and measured."""

    name: str
    unit: str
    predicted: float
    measured: float
    low: float | None = None
    high: float | None = None
    no_range: str = ""

    @property
    def error_percent(self) -> float | None:
        """(predicted - measured) / measured in percent."""
        return (self.predicted / self.measured - 1) * 100 if self.measured else None

    @property
    def inside(self) -> bool | None:
        """Whether the measured value lies in the predicted range, in the digits that are shown; None without a range."""
        if self.low is None or self.high is None:
            return None
        return shown(self.low) <= shown(self.measured) <= shown(self.high)


@dataclass(frozen=True)
class Verdict:
    """Whether one limit of the request held, and why it can be said."""

    limit: str
    allowed: str
    measured: str
    verdict: Word
    why: str


COUNTED = "it follows from sizes, not from an estimate"


def row(
    name: str, unit: str, predicted: Range | float | None, measured: float | None, no_range: str = COUNTED
) -> list[Row]:
    """A row, or none when one side is missing. no_range: why a number has no interval."""
    if predicted is None or measured is None:
        return []
    if isinstance(predicted, Range):
        return [Row(name, unit, predicted.value, measured, predicted.low, predicted.high)]
    return [Row(name, unit, predicted, measured, no_range=no_range)]


def serving_rows(plan: Plan, measured: dict[str, float]) -> tuple[Row, ...]:
    """Latencies, throughput and memory of a serving plan beside what was measured."""
    p, memory = plan.predicted, plan.memory
    rows = [
        *row("ttft_ms", "ms", p.get("ttft_ms"), measured.get("ttft_ms")),
        *row("tpot_ms", "ms", p.get("tpot_ms"), measured.get("tpot_ms")),
        *row("e2e_ms", "ms", p.get("e2e_ms"), measured.get("e2e_ms")),
        *row("throughput_tokens_per_s", "tokens/s", p.get("throughput_tokens_per_s"), measured.get("throughput_tokens_per_s")),
    ]  # fmt: skip
    if memory is not None:
        rows += _peak_row(plan, measured)
        rows += row("weights_gib", "GiB", memory.weights_gib, measured.get("weights_gib"))
        rows += row("kv_cache_gib", "GiB", memory.kv_cache_gib, measured.get("kv_cache_gib"))
        rows += row("kv_cache_tokens", "tokens", float(memory.kv_cache_tokens), measured.get("kv_cache_tokens"))
    return tuple(rows)


def _peak_row(plan: Plan, measured: dict[str, float]) -> list[Row]:
    """The peak with its interval, or the reason that it has none."""
    peak, why = peak_range(plan)
    return row("peak_memory_gib", "GiB", peak, measured.get("peak_memory_gib"), why)


def training_rows(plan: Plan, measured: dict[str, float]) -> tuple[Row, ...]:
    """Step time, speed and memory of a training plan beside what was measured."""
    p = plan.predicted
    rows = [
        *row("step_time_s", "s", p.get("step_time_s"), measured.get("step_time_s")),
        *row("throughput_tokens_per_s", "tokens/s", p.get("throughput_tokens_per_s"), measured.get("tokens_per_s")),
        *row("tokens_per_s_per_gpu", "tokens/s", p.get("tokens_per_s_per_gpu"), measured.get("tokens_per_s_per_gpu")),
    ]
    if plan.memory is not None:
        rows += _peak_row(plan, measured)
    return tuple(rows)


def at_least(tail: float, n: int, k: int) -> float:
    """P(K >= k) for K ~ Binomial(n, tail)."""
    return 1.0 - at_most(tail, n, k - 1) if k > 0 else 1.0


def at_most(tail: float, n: int, k: int) -> float:
    """P(K <= k) for K ~ Binomial(n, tail), summed in logarithms."""
    logs = (
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * math.log(tail) + (n - i) * math.log1p(-tail)
        for i in range(min(k, n) + 1)
    )  # fmt: skip
    return min(1.0, sum(math.exp(v) for v in logs))


def percentile_verdict(values: list[float], failed: int, allowed: float, percent: int) -> tuple[Word, str]:
    """Judge a limit on a percentile from how many requests exceed it; a failed request exceeds every limit."""
    n, over = len(values) + failed, sum(v > allowed for v in values) + failed
    tail = 1 - percent / 100
    said = f"{over} of {n} requests are over it"
    if not n:
        return UNKNOWN, "no request was measured"
    if at_most(tail, n, over) < CONFIDENCE_TAIL:
        return HELD, said
    if at_least(tail, n, over) < CONFIDENCE_TAIL:
        return BROKE, said
    return UNKNOWN, f"{said}; more requests are needed for a {percent}th percentile"


def mean_verdict(values: list[float], failed: int, allowed: float) -> tuple[Word, str]:
    """Judge a limit on a mean from the interval of the mean."""
    n = len(values)
    if n < 2:
        return UNKNOWN, f"{n} requests were measured"
    if failed > FAILURES_ALLOWED * (n + failed):
        return UNKNOWN, f"{failed} of {n + failed} requests failed"
    mean = sum(values) / n
    half = NORMAL_QUANTILE * math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    if mean + half <= allowed:
        return HELD, f"{n} requests"
    if mean - half > allowed:
        return BROKE, f"{n} requests"
    return UNKNOWN, f"{n} requests; the mean is within {half:.3g} ms of the limit"


def serving_verdicts(plan: Plan, found: Measured, table: dict[str, float]) -> tuple[Verdict, ...]:
    """One verdict a limit of the request that a load can judge."""
    limits: dict[str, Any] = dict(plan.request.get("limits") or {})
    out = []
    for key, name, text in (
        ("ttft_s", "ttft", "TTFT, 95th percentile"),
        ("tpot_s", "tpot", "TPOT, mean"),
        ("e2e_s", "e2e", "E2E, mean"),
    ):
        if limits.get(key) is None:
            continue
        allowed_ms, values = 1e3 * float(limits[key]), found.values_ms(name)
        word: Word
        if not values and found.answered:
            word, why = UNKNOWN, "the server does not stream its answers"
        elif name == "ttft":
            word, why = percentile_verdict(values, found.failed, allowed_ms, TTFT_PERCENTILE)
        else:
            word, why = mean_verdict(values, found.failed, allowed_ms)
        shown = format_duration(table[f"{name}_ms"] / 1e3) if f"{name}_ms" in table else "-"
        out.append(Verdict(text, format_duration(allowed_ms / 1e3), shown, word, why))
    least = limits.get("min_throughput_tokens_per_s")
    if least is not None:
        out.append(_throughput(plan, float(least), table.get("throughput_tokens_per_s")))
    if limits.get("max_accuracy_loss_percent") is not None and plan.deployment is not None:
        loss = f"{float(limits['max_accuracy_loss_percent']):g}%"
        out.append(Verdict("accuracy loss", loss, "-", UNKNOWN, "a load does not measure accuracy"))
    return tuple(out)


def _throughput(plan: Plan, least: float, measured: float | None) -> Verdict:
    load = dict(plan.request.get("workload") or {})
    offered = float(load.get("rate_per_s") or 0) * float(load.get("output_tokens") or 0)
    word, why = HELD, "output tokens while the load was whole"
    if measured is None:
        word, why = UNKNOWN, "nothing was measured"
    elif measured < least:
        word = BROKE
        if 0 < offered < least:
            word, why = UNKNOWN, f"only {offered:,.0f} tokens/s were asked for"
    shown = "-" if measured is None else f"{measured:,.0f} tokens/s"
    return Verdict("throughput", f"{least:,.0f} tokens/s", shown, word, why)


def training_verdicts(plan: Plan, measured: dict[str, float], steps: int) -> tuple[Verdict, ...]:
    """Step time, deadline and budget of the run, carried on at the measured step time."""
    limits: dict[str, Any] = dict(plan.request.get("limits") or {})
    dep, step_s = plan.deployment, measured.get("step_time_s")
    if step_s is None or dep is None or dep.train is None:
        return ()
    run_s = step_s * dep.train.steps
    usd = run_s / 3600 * plan.cost.usd_per_hour if plan.cost is not None else None
    checks: list[tuple[str, str, float | None, bool]] = [
        ("step time", "step_s", step_s, True), ("deadline", "deadline_s", run_s, True), ("budget", "budget_usd", usd, False),
    ]  # fmt: skip
    out = []
    for name, key, value, is_time in checks:
        if limits.get(key) is None or value is None:
            continue
        allowed = float(limits[key])
        words = [format_duration(v) if is_time else f"{v:,.2f} USD" for v in (allowed, value)]
        why = f"median of {steps} steps" + ("" if key == "step_s" else f", for all {dep.train.steps} steps")
        out.append(Verdict(name, words[0], words[1], HELD if value <= allowed else BROKE, why))
    return tuple(out)

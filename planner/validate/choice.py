"""Choice quality: among measured alternatives of one job, how much worse is the one the predictions would pick?

A group holds rows of one metric that differ only in what a planner decides (tensor, pipeline, expert, data parallelism, micro-batch,
recomputation, stage); same model, hardware, load and source. Lower is better for times, higher for rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from planner.validate.prediction import Prediction
from planner.validate.rows import Row, measured

SAME = {  # columns that make two rows alternatives of one job; the source counts up to its row label
    "serving": ("metric", "model", "gpu", "n_gpus", "precision_w", "kv_dtype", "engine", "engine_version", "batch_or_concurrency", "isl",
                "osl", "load_kind"),
    "training": ("metric", "model", "seq_len", "gpu", "n_gpus", "global_batch", "precision", "optimizer", "task"),
}  # fmt: skip
CHOSEN = {
    "serving": ("tp", "pp", "note"),
    "training": (
        "tp",
        "pp",
        "cp",
        "dp",
        "ep",
        "zero_or_fsdp_stage",
        "micro_batch",
        "interleave",
        "recompute",
        "offload",
    ),
}
BETTER_HIGH = ("tok_s", "tokens_per_s", "req_s", "mfu", "tflops", "throughput", "samples_per_s")
CHOICES = ("ttft_ms", "tpot_ms", "itl_ms", "output_tok_s_total", "output_tok_s_per_gpu", "req_s", "step_time_s", "iteration_time_s",
           "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "mfu_percent", "samples_per_s")  # fmt: skip


@dataclass(frozen=True)
class ChoiceScore:
    """Choices among measured alternatives of a metric: groups, rows in them, regret of the predicted best against the measured best
    (median, mean, worst; fractions), share of groups whose measured best was picked, regret of a pick at random, mean rank
    correlation (Spearman) of groups of at least three."""

    metric: str
    groups: int
    rows: int
    median_regret: float
    mean_regret: float
    worst_regret: float
    best_picked: float
    random_regret: float
    rank_correlation: float | None


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, ties get their mean."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for at in order[start : end + 1]:
            found[at] = (start + end) / 2 + 1
        start = end + 1
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation of two series, None where either is constant."""
    x, y = ranks(a), ranks(b)
    mx, my = fmean(x), fmean(y)
    sx, sy = sum((v - mx) ** 2 for v in x), sum((v - my) ** 2 for v in y)
    if sx == 0 or sy == 0:
        return None
    return float(sum((u - mx) * (v - my) for u, v in zip(x, y, strict=True)) / (sx * sy) ** 0.5)


def regrets(truth: Sequence[float], predicted: Sequence[float], high: bool) -> tuple[float, float]:
    """(regret of the predicted best, mean regret of all): how much worse than the measured best, as a fraction of it."""
    best = max(truth) if high else min(truth)
    cost = [best / v - 1 if high else v / best - 1 for v in truth]
    pick = max(range(len(truth)), key=lambda i: predicted[i] if high else -predicted[i])
    return cost[pick], fmean(cost)


def choice_scores(task: str, rows: Sequence[Row], predictions: Sequence[Prediction]) -> list[ChoiceScore]:
    """One ChoiceScore per metric that has groups of at least two different configurations; empty for memory."""
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[tuple[float, float]]]] = {}
    for row, prediction in zip(rows, predictions, strict=True):
        value = measured(row)
        if task not in SAME or row["metric"] not in CHOICES or not value or value <= 0 or not prediction.predicted:
            continue
        key = (*(row.get(c, "") for c in SAME[task]), _origin(row))
        setting = tuple(row.get(c, "") for c in CHOSEN[task])
        groups.setdefault(key, {}).setdefault(setting, []).append((value, prediction.predicted))
    found: dict[str, list[tuple[int, float, float, float | None]]] = {}
    for key, settings in groups.items():
        if len(settings) < 2:
            continue
        truth = [fmean(v for v, _ in pairs) for pairs in settings.values()]  # repeats of a setting are averaged
        guess = [fmean(p for _, p in pairs) for pairs in settings.values()]
        high = any(part in key[0] for part in BETTER_HIGH)
        regret, chance = regrets(truth, guess, high)
        found.setdefault(key[0], []).append(
            (len(truth), regret, chance, spearman(truth, guess) if len(truth) > 2 else None)
        )
    return [_score(metric, groups) for metric, groups in sorted(found.items())]


def _score(metric: str, groups: list[tuple[int, float, float, float | None]]) -> ChoiceScore:
    regret = [g[1] for g in groups]
    rank = [g[3] for g in groups if g[3] is not None]
    return ChoiceScore(metric, len(groups), sum(g[0] for g in groups), median(regret), fmean(regret), max(regret),
                       fmean(r <= 1e-9 for r in regret), fmean(g[2] for g in groups), fmean(rank) if rank else None)  # fmt: skip


def _origin(row: Row) -> str:
    """Source of a row without what names the single row or run: the words before the first 'id=', ' L' line number or '#'."""
    text = row.get("source", "")
    for mark in (" id=", " L", "#"):
        text = text.split(mark)[0]
    return text

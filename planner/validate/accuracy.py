"""Ground truth in, predictions out: reads measured rows, replays them, writes every row beside its prediction.

A file has the columns of its task (memory, serving, training) and at least `metric` and `value`. One replay function
per task: rows in, one Prediction a row out, in order.
"""

from __future__ import annotations

import csv
import importlib
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from types import ModuleType

from planner.errors import InvalidValueError, MissingExtraError, PlannerError
from planner.validate.choice import ChoiceScore, choice_scores
from planner.validate.prediction import Prediction
from planner.validate.rows import Row, measured, read_rows

TASKS = ("memory", "serving", "training")
ADDED = ("predicted", "low", "high", "error_percent", "skipped", "assumed")
_CLASS_COLUMNS = {
    "memory": ("task", "engine", "evidence"),
    "serving": ("load_kind", "gpu"),
    "training": ("task", "gpu"),
}


@dataclass(frozen=True)
class Score:
    """How well one metric of one class was predicted. Errors in percent of the measured value, None without any."""

    metric: str
    group: str
    rows: int
    predicted: int
    median_ape: float | None
    p95_ape: float | None
    mean_ape: float | None
    bias: float | None
    inside: float | None

    @property
    def coverage(self) -> float:
        """Share of rows that got a prediction."""
        return self.predicted / self.rows if self.rows else 0.0


def module_of(task: str) -> ModuleType:
    """The replay module of a task; a clear error while it does not exist."""
    name = f"planner.validate.accuracy_{task}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise InvalidValueError(
                f"{task} rows cannot be replayed yet", "this version has no estimator for them", f"Leave out --{task}."
            ) from None
        raise MissingExtraError(str(error.name), "dev", f"replaying {task} rows") from None


def error_percent(row: Row, prediction: Prediction) -> float | None:
    """(predicted - measured) / |measured| in percent; None without both or when the measured value is 0."""
    value = measured(row)
    if value is None or value == 0 or prediction.predicted is None:
        return None
    return (prediction.predicted - value) / abs(value) * 100


@dataclass(frozen=True)
class Replay:
    """What a replayed file gave: scores, choices among alternatives, rows as written."""

    scores: list[Score]
    choices: list[ChoiceScore]
    written: list[Row]


def run(task: str, path: Path, out: Path) -> Replay:
    """Replays a file, writes out/<task>.csv whole or not at all."""
    rows = read_rows(path)
    module = module_of(task)
    predictions = module.replay(rows)
    if len(predictions) != len(rows):
        raise PlannerError(f"the {task} replay gave {len(predictions)} predictions for {len(rows)} rows")
    written = [_joined(row, prediction) for row, prediction in zip(rows, predictions, strict=True)]
    _write(out / f"{task}.csv", [*(c for c in rows[0] if c not in ADDED), *ADDED], written)
    derived = module.derived(rows, predictions) if hasattr(module, "derived") else []
    return Replay(
        scores(task, rows, predictions) + derived_scores(derived), choice_scores(task, rows, predictions), written
    )


def _joined(row: Row, prediction: Prediction) -> Row:
    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:.6g}"

    added = (prediction.predicted, prediction.low, prediction.high, error_percent(row, prediction))
    return {**row, **dict(zip(ADDED, (*map(shown, added), prediction.skipped, prediction.assumed), strict=True))}


def _write(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", newline="", encoding="utf-8", dir=path.parent, delete=False) as stream:
            temporary = stream.name
            writer = csv.DictWriter(stream, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise InvalidValueError(
                f"{path} cannot be written", error.strerror or "", "Choose another --out."
            ) from None
        raise


def scores(task: str, rows: Sequence[Row], predictions: Sequence[Prediction]) -> list[Score]:
    """One Score per metric and class, and one per metric over all classes ('all')."""
    groups: dict[tuple[str, str], list[tuple[Row, Prediction]]] = {}
    for row, prediction in zip(rows, predictions, strict=True):
        label = " ".join(row[c] for c in _CLASS_COLUMNS[task] if row.get(c)) or "unstated"
        label += " out of memory" if row.get("task") == "train" and row.get("outcome") == "oom" else ""
        for name in (label, "all"):
            groups.setdefault((row["metric"], name), []).append((row, prediction))
    return [_score(metric, name, pairs) for (metric, name), pairs in sorted(groups.items())]


def derived_scores(found: Sequence[tuple[str, str, float, float]]) -> list[Score]:
    """Scores of figures made of several rows: (metric, class, predicted, measured) each."""
    groups: dict[tuple[str, str], list[tuple[Row, Prediction]]] = {}
    for metric, name, predicted, value in found:
        pair = ({"metric": metric, "value": repr(value)}, Prediction(predicted, None, None))
        groups.setdefault((metric, name), []).append(pair)
    return [_score(metric, name, pairs) for (metric, name), pairs in sorted(groups.items())]


def _score(metric: str, name: str, pairs: Sequence[tuple[Row, Prediction]]) -> Score:
    errors = [e for e in (error_percent(row, p) for row, p in pairs) if e is not None]
    done = [(row, p) for row, p in pairs if p.predicted is not None]
    size = sorted(abs(e) for e in errors)
    held = [
        p.low <= v <= p.high
        for r, p in done
        if p.low is not None and p.high is not None and (v := measured(r)) is not None
    ]
    return Score(
        metric,
        name,
        len(pairs),
        len(done),
        median(size) if size else None,
        size[min(len(size) - 1, math.ceil(0.95 * len(size)) - 1)] if size else None,
        fmean(size) if size else None,
        fmean(errors) if errors else None,
        fmean(held) if held else None,
    )


def reasons(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Why written rows were skipped, most frequent first."""
    counts: dict[str, int] = {}
    for row in rows:
        if row["skipped"]:
            counts[row["skipped"]] = counts.get(row["skipped"], 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))

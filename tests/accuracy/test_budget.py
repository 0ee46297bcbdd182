"""The error budget: predictions of our own small set of measured facts stay within budget.yaml."""

from functools import cache
from pathlib import Path

import pytest
import yaml

from planner.validate.accuracy import module_of, scores
from planner.validate.rows import read_rows

HERE = Path(__file__).parent
BUDGET = yaml.safe_load((HERE / "budget.yaml").read_text())
CASES = [(task, metric) for task, metrics in BUDGET.items() for metric in metrics]


@cache
def found(task):
    rows = read_rows(HERE / f"{task}.csv")
    return {s.metric: s for s in scores(task, rows, module_of(task).replay(rows)) if s.group == "all"}


@pytest.mark.parametrize(("task", "metric"), CASES)
def test_error_stays_within_budget(task, metric):
    score, budget = found(task)[metric], BUDGET[task][metric]
    assert score.rows >= 5
    assert score.coverage >= budget["coverage"]
    assert score.median_ape <= budget["median_ape"]
    if "inside" in budget:
        assert score.inside >= budget["inside"]


@pytest.mark.parametrize("task", list(BUDGET))
def test_every_metric_with_enough_facts_has_a_budget(task):
    assert {m for m, s in found(task).items() if s.rows >= 5} == set(BUDGET[task])


@pytest.mark.parametrize("task", list(BUDGET))
def test_every_fact_states_its_source(task):
    rows = read_rows(HERE / f"{task}.csv")
    assert all(row["source"].strip() and row["value"].strip() for row in rows)
    assert len({tuple(row.items()) for row in rows}) == len(rows)

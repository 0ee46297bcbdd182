"""Plans that were edited by hand: numbers that no plan can hold are named."""

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import PlanFileError
from planner.plan import plan_from_dict
from planner.plan_check import check_numbers, numbers

PLAN = Path(__file__).parents[2] / "examples" / "main-job" / "plan.yaml"


def edited(path, value):
    tree = yaml.safe_load(PLAN.read_text())
    *way, last = path.split(".")
    at = tree
    for key in way:
        at = at[int(key)] if key.isdigit() else at[key]
    at[int(last) if last.isdigit() else last] = value
    return tree


def test_the_examples_pass():
    for path in sorted(PLAN.parents[1].glob("*/plan.yaml")):
        plan_from_dict(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("deployment.offers.0.usd_per_hour", -5.0),
        ("deployment.offers.0.usd_per_hour", float("nan")),
        ("deployment.offers.0.count", 10**9),
        ("memory.weights_gib", float("inf")),
        ("memory.total_gib", -1.0),
        ("cost.usd_per_hour", -0.01),
        ("predicted.ttft_ms.value", 1e30),
        ("deployment.gpus", -1),
    ],
)
def test_a_number_no_plan_can_hold_is_named(path, value):
    with pytest.raises(PlanFileError, match=path.split(".")[-1]):
        plan_from_dict(edited(path, value))


def test_a_value_outside_its_own_range_is_named():
    with pytest.raises(PlanFileError, match="outside its own range"):
        plan_from_dict(edited("predicted.tpot_ms.low", 1e6))


def test_a_negative_headroom_is_a_plan_that_does_not_fit():
    plan_from_dict(edited("memory.headroom_gib", -3.0))


trees = st.recursive(
    st.one_of(st.floats(allow_nan=True), st.integers(), st.booleans(), st.text(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    max_leaves=12,
)


@given(trees)
def test_any_tree_is_walked(tree):
    assert all(isinstance(v, float) for _, v in numbers(tree))
    with contextlib.suppress(PlanFileError):
        check_numbers({"memory": tree})

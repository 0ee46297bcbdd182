"""Plans that were edited by hand: numbers that no plan can hold are named."""

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from planner.cli.main import run
from planner.errors import PlanFileError
from planner.plan import plan_from_dict
from planner.plan_check import check_numbers, check_size, numbers, values_of

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


def nested(depth, width=9):
    """YAML of a few lines that stands for width^depth values."""
    lines = ["a0: &a0 [" + ",".join(["x"] * width) + "]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * width)}]" for i in range(1, depth)]
    return "\n".join(lines) + "\n"


def one_line(text, tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    assert run(["emit", str(path), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert len(err) < 500
    return err


@pytest.mark.parametrize("value", ["*a6", "x" * 10**5, "0x" + "f" * 10**4, "{k: *a6}", "&me [*me]", ".nan"])
def test_a_schema_version_is_cut_in_its_error(value, tmp_path, capsys):
    assert "schema_version" in one_line(nested(7) + f"schema_version: {value}\n", tmp_path, capsys)


@pytest.mark.parametrize("field", ["request", "validation"])
@pytest.mark.parametrize("value", ["{x: *a8}", "&me {x: *me}"])
def test_aliases_that_stand_for_more_than_any_plan(field, value, tmp_path, capsys):
    tree = yaml.safe_load(PLAN.read_text())
    del tree[field]
    err = one_line(nested(9) + yaml.safe_dump(tree) + f"{field}: {value}\n", tmp_path, capsys)
    assert "larger than any plan" in err


@pytest.mark.parametrize("path", ["memory", "predicted"])
def test_a_long_name_of_a_field_is_cut(path, tmp_path, capsys):
    tree = yaml.safe_load(PLAN.read_text())
    tree[path]["x" * 10**4] = float("nan")
    tree[path]["y" * 10**4] = {"value": 1.0, "low": 2.0, "high": 3.0}
    if path == "memory":
        tree[path] = {"x" * 10**4: 1}
    one_line(yaml.safe_dump(tree), tmp_path, capsys)


def test_values_are_counted_written_out():
    shared = [1, 2]
    assert values_of({"a": shared, "b": [shared, shared]}, {}) == 1 + 3 + (1 + 3 + 3)
    check_size(yaml.safe_load(PLAN.read_text()))

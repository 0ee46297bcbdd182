"""The commands do their job on the real catalog, in every output form."""

import csv
import io
import json

import pytest

from planner.cli.main import run
from planner.plan import load_plan, plan_to_dict

FAST = ["--gpu", "l40s", "--gpu", "h100-sxm"]


def output(capsys, arguments, code=0):
    got = run([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert got == code, err
    return out


def test_main_job(capsys, tmp_path):
    out = output(
        capsys, ["solve", "--model", "70b", "--goal", "cheapest", "--latency", "200ms", "--out", tmp_path / "plan"]
    )
    assert "proved optimal" in out
    assert "95th percentile" in out
    plan = load_plan(tmp_path / "plan" / "plan.yaml")
    assert plan.status == "optimal"
    assert plan.predicted["ttft_ms"].value <= 200
    assert plan.memory.total_gib <= plan.memory.gpu_usable_gib
    assert plan.solver.objective == plan.solver.best_bound
    assert len(plan.alternatives) == 3
    assert len({a.kind for a in plan.alternatives}) == 3
    assert (tmp_path / "plan" / "serve.sh").read_text().startswith("#!")


def test_plan_round_trips_through_yaml_and_json(capsys, tmp_path):
    tree = json.loads(output(capsys, ["solve", "--model", "8b", *FAST, "--json", "--out", tmp_path]))
    for key in ("schema_version", "status", "task", "request", "assumptions", "model", "deployment", "memory", "predicted", "cost", "solver", "binding",
                "alternatives", "infeasible", "provenance", "validation"):  # fmt: skip
        assert key in tree
    assert {"value", "low", "high"} == set(tree["predicted"]["ttft_ms"])
    assert plan_to_dict(load_plan(tmp_path / "plan.yaml")) == tree
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    assert plan_to_dict(load_plan(tmp_path / "plan.json")) == tree


def test_emit_from_a_plan_equals_solve(capsys, tmp_path):
    output(capsys, ["solve", "--model", "8b", *FAST, "--out", tmp_path / "a"])
    output(capsys, ["emit", tmp_path / "a" / "plan.yaml", "--out", tmp_path / "b"])
    for file in (tmp_path / "b").iterdir():
        assert file.read_text() == (tmp_path / "a" / file.name).read_text()


def test_compare_in_every_form(capsys):
    arguments = ["compare", "--model", "8b", *FAST, "--rate", "2"]
    rows = json.loads(output(capsys, [*arguments, "--json"]))
    costs = [r["cost"]["usd_per_hour"] for r in rows]
    assert len(rows) > 3
    assert costs == sorted(costs)
    table = list(csv.DictReader(io.StringIO(output(capsys, [*arguments, "--format", "csv"]))))
    assert [float(r["usd_per_hour"]) for r in table] == pytest.approx(costs)
    assert output(capsys, [*arguments, "--format", "markdown"]).count("\n|") >= len(rows)
    assert output(capsys, [*arguments, "--top", "2"]).count("\n") <= 5


def test_compare_best_equals_solve(capsys):
    arguments = ["--model", "8b", *FAST, "--rate", "3", "--latency", "300ms"]
    plan = json.loads(output(capsys, ["solve", *arguments, "--json"]))
    rows = json.loads(output(capsys, ["compare", *arguments, "--json"]))
    assert rows[0]["cost"]["usd_per_hour"] == plan["cost"]["usd_per_hour"]


def test_memory_adds_up(capsys):
    tree = json.loads(output(capsys, ["memory", "--model", "70b", "--gpu", "h100-sxm", "--tp", "4", "--json"]))
    assert sum(gib for _, gib in tree["parts"]) == pytest.approx(tree["required_gib"], abs=0.01)
    assert tree["fits"]
    assert "DOES NOT FIT" in output(capsys, ["memory", "--model", "70b", "--gpu", "h100-sxm"], code=3)


def test_estimate_of_what_does_not_fit_says_so(capsys):
    out = output(
        capsys,
        ["estimate", "--model", "70b", "--on", "2xl40s", "--tp", "2", "--precision", "bf16", "--concurrency", "4"],
        code=3,
    )
    assert "DOES NOT FIT" in out


def test_help_of_every_command_has_an_example(capsys):
    for command in ("solve", "compare", "estimate", "memory"):
        assert "Example: planner" in output(capsys, [command, "--help"])


def test_negotiated_price_wins(capsys, tmp_path):
    (tmp_path / "prices").mkdir()
    (tmp_path / "prices" / "lambda.csv").write_text(
        "instance,region,tier,usd_per_hour,observed_on,source\ngpu_8x_h100_sxm5,us-east-1,reserved,0.5,2026-11-01,our contract\n"
    )
    tree = json.loads(
        output(
            capsys,
            ["solve", "--model", "8b", "--catalog", tmp_path, "--tier", "reserved", "--gpu", "h100-sxm", "--json"],
        )
    )
    assert tree["cost"]["usd_per_hour"] == 0.5

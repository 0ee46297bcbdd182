"""`planner catalog`: what it prints, and how it fails."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from planner.cli.catalog import app
from planner.errors import CatalogError, PlannerError


def run(*args):
    result = CliRunner().invoke(app, list(args))
    if isinstance(result.exception, PlannerError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_list_is_sorted_by_gpu_hour():
    rows = json.loads(run("list", "--gpu", "h100", "--json"))
    costs = [row["usd_per_gpu_hour"] for row in rows]
    assert costs == sorted(costs)
    assert {row["gpu"] for row in rows} == {"h100-sxm"}
    assert set(rows[0]) >= {"provider", "instance_type", "usd_per_hour", "region", "tier", "observed_on", "source"}


def test_list_filters_and_says_how_many_are_hidden():
    rows = json.loads(run("list", "--provider", "aws", "--tier", "on_demand", "--gpus-min", "8", "--json"))
    assert {row["provider"] for row in rows} == {"aws"}
    assert min(row["gpus"] for row in rows) == 8
    text = run("list", "--limit", "2")
    assert "2 of" in text
    assert "USD/GPU-h" in text


def test_show_gpu_link_and_instance():
    gpu = json.loads(run("show", "RTX 4090", "--json"))[0]
    assert gpu["entry"] == "gpu"
    assert gpu["peak_tflops_dense"]["fp16"] == 165.2
    assert gpu["prices"]
    assert "229.35" in run("show", "nvswitch-nvlink3")
    text = run("show", "aws/p5.48xlarge")
    assert "efa-400g" in text
    assert "55.04 USD/h" in text
    assert "no price found" in run("show", "a4x-highgpu-4g")


def test_show_unknown_and_ambiguous():
    with pytest.raises(PlannerError, match=r"p5\.48xlarge"):
        run("show", "p5.48xlarg")
    with pytest.raises(PlannerError, match="could be"):
        run("show", "v100")


def test_check_passes_on_ours():
    assert "no faults" in run("check")
    assert json.loads(run("check", "--json"))["faults"] == []


def test_check_lists_all_faults_of_a_folder(tmp_path):
    (tmp_path / "prices").mkdir()
    header = "instance,region,tier,usd_per_hour,observed_on,source\n"
    (tmp_path / "prices" / "aws.csv").write_text(header + "p5.48xlarge,us-east-1,spot,60,2026-11-01,x\n")
    (tmp_path / "prices" / "gcp.csv").write_text(header + "a3-highgpu-8g,us-east1,spot,0,2026-11-01,x\n")
    result = CliRunner().invoke(app, ["check", "--catalog", str(tmp_path)])
    assert isinstance(result.exception, CatalogError)
    assert result.exception.exit_code == 2
    assert "spot 60 is not below on-demand 55.04" in result.output
    assert "prices/gcp.csv" in result.output


def test_no_match_is_an_error():
    with pytest.raises(PlannerError, match="--gpus-min"):
        run("list", "--gpus-min", "999")


def test_loading_needs_no_heavy_library():
    code = (
        "import sys; from planner.hardware.catalog import load_catalog; load_catalog();"
        "print([m for m in ('numpy', 'ortools', 'rich', 'pydantic', 'torch', 'typer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

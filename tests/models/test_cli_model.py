"""`planner model show` and `planner model list`."""

import json

import pytest
from typer.testing import CliRunner

from planner.cli.model import app
from planner.errors import PlannerError
from tests.models.configs import BASE


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def test_show_explains_a_model():
    text = run("show", "70b").stdout
    for words in (
        "70,553,706,496",
        "80 x",
        "8 key/value heads of 128",
        "327,680 bytes a token",
        "not 3: 64 attention heads",
        "'70b' is read as",
    ):
        assert words in text


def test_show_as_json():
    found = json.loads(run("show", "gpt-oss-20b", "--json").stdout)
    assert found["params_total"] == 20914757184
    assert found["native_precision"] == "mxfp4"
    assert [k["count"] for k in found["layer_kinds"]] == [12, 12]
    assert found["weights"][0]["precision"] == "mxfp4"


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v3.2",
        "qwen3-next",
        "nemotron-3-nano",
        "deepseek-v4-pro",
        "whisper",
        "flan-t5-xl",
        "falcon-h1-7b",
        "gemma-4-26b",
        "gpt2",
    ],
)
def test_show_every_kind(name):
    assert "parameters:" in run("show", name).stdout
    json.loads(run("show", name, "--json").stdout)


def test_show_a_local_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **BASE}))
    assert str(path) in run("show", str(path)).stdout


def test_show_holds_the_count_against_the_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **BASE, "torch_dtype": "bfloat16"}))
    counted = 2 * json.loads(run("show", str(tmp_path), "--json").stdout)["params_total"]
    index = {"metadata": {"total_size": int(counted / 1.01)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "differs by +1.00%" in run("show", str(tmp_path)).stdout


def test_show_refuses_in_one_line():
    result = run("show", "nobody", "--offline")
    assert isinstance(result.exception, PlannerError)
    assert "\n" not in str(result.exception)


def test_list():
    text = run("list", "gemma").stdout
    assert "google/gemma-3-27b-it" in text
    assert "Llama" not in text
    assert len(json.loads(run("list", "--json").stdout)) > 100

"""`vllm bench serve` as the client: its options, its result file (keys of vllm 0.32.0), a stand-in for the program."""

import json
import sys

import pytest

from planner.cli.main import run
from planner.validate.engine_bench import command, read_result
from planner.validate.engine_http import Server
from planner.validate.engine_load import Load
from planner.validate.engine_run import Options
from tests.validate.engine_helpers import fake_files, saved, serving_plan

RESULT = {
    "completed": 50, "failed": 1, "total_input_tokens": 1600, "total_output_tokens": 400, "output_throughput": 318.5,
    "mean_ttft_ms": 55.0, "p50_ttft_ms": 54.0, "p95_ttft_ms": 60.0, "p99_ttft_ms": 61.0, "mean_tpot_ms": 12.0,
    "mean_e2el_ms": 140.0, "p95_e2el_ms": 150.0,
}  # fmt: skip
STAND_IN = """#!{python}
import json, sys
words = sys.argv
place = words[words.index("--result-dir") + 1] + "/" + words[words.index("--result-filename") + 1]
open({calls!r}, "w").write(json.dumps(words))
open(place, "w").write({result!r})
"""


def test_the_result_file_is_read():
    table, failed, answered = read_result(RESULT)
    assert (failed, answered) == (1, 50)
    assert table["ttft_ms_p95"] == 60.0
    assert table["e2e_ms_mean"] == 140.0
    assert table["throughput_tokens_per_s"] == 318.5
    assert (table["input_tokens_mean"], table["output_tokens_mean"]) == (32, 8)


@pytest.mark.parametrize(
    ("load", "flag"), [(Load(((32, 8),), 4.0), "--request-rate"), (Load(((32, 8),), None, 9), "--max-concurrency")]
)
def test_options(load, flag):
    words = command("vllm", Server("127.0.0.1", 8000), "name", "tok", Options(load), "/tmp/x")
    assert words[words.index(flag) + 1] in ("4.0", "9")
    assert ("--request-rate" in words) != ("--max-concurrency" in words)
    assert words[words.index("--num-prompts") + 1] == ("240" if load.rate_per_s else "60")
    assert words[words.index("--base-url") + 1] == "http://127.0.0.1:8000"


def test_the_command(capsys, tmp_path):
    bin_dir, calls = tmp_path / "bin", tmp_path / "calls"
    bin_dir.mkdir()
    (bin_dir / "vllm").write_text(STAND_IN.format(python=sys.executable, calls=str(calls), result=json.dumps(RESULT)))
    (bin_dir / "vllm").chmod(0o755)
    words = [
        "--files",
        str(fake_files(tmp_path / "files", "ok")),
        "--cpu",
        "--bench",
        "vllm",
        "--env",
        f"PATH={bin_dir}:/usr/bin:/bin",
        "--json",
    ]
    path = saved(serving_plan(), tmp_path)
    assert run(["validate", str(path), "--level", "engine", *words]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["validation"]["requests"] == 50
    assert tree["validation"]["measured"]["ttft_ms"] == 60.0
    assert tree["validation"]["measured"]["weights_gib"] == 1.5
    assert tree["limits"][0]["verdict"] == "held"
    sent = json.loads(calls.read_text())
    assert sent[1:3] == ["bench", "serve"]
    assert sent[sent.index("--random-input-len") + 1] == "32"


def test_without_vllm(capsys, tmp_path):
    words = [
        "--files",
        str(fake_files(tmp_path / "files", "ok")),
        "--cpu",
        "--bench",
        "vllm",
        "--env",
        "PATH=/usr/bin:/bin",
    ]
    assert run(["validate", str(saved(serving_plan(), tmp_path)), "--level", "engine", *words]) == 2
    assert "--bench vllm needs the program vllm" in capsys.readouterr().err

"""Every wrong input ends in one clear line on stderr, exit code 2, nothing on stdout, nothing written."""

import json
import os
import subprocess
import sys

import pytest

from planner.cli.main import run

SOLVE = ["solve", "--model", "llama-3.1-8b", "--gpu", "l40s"]


def outcome(capsys, arguments):
    code = run([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("extra", "mentions"),
    [
        (["--model", "lama-3.1-8b"], "llama-3.1-8b"),
        (["--gpu", "h1oo-sxm"], "h100-sxm"),
        (["--provider", "lamda"], "lambda"),
        (["--engine", "vlm"], "vllm"),
        (["--precision", "fp7"], "fp8"),
        (["--kv-cache-dtype", "fp7"], "fp8"),
        (["--goal", "cheap"], "cheapest"),
        (["--tier", "spott"], "spot"),
        (["--region", "atlantis-1"], "region"),
        (["--latency", "200"], "unit"),
        (["--latency", "-5ms"], "positive"),
        (["--latency", "0ms"], "positive"),
        (["--latency", "nanms"], "200ms"),
        (["--tpot", "fast"], "tpot"),
        (["--e2e", "1e999s"], "positive"),
        (["--budget", "20"], "20/h"),
        (["--budget", "-1/h"], "positive"),
        (["--rate", "0"], "positive"),
        (["--rate", "nan"], "rate"),
        (["--rate", "1", "--concurrency", "2"], "either"),
        (["--concurrency", "1.5"], "whole"),
        (["--input-tokens", "0"], "positive"),
        (["--output-tokens", "-3"], "positive"),
        (["--input-tokens", "200000"], "context"),
        (["--max-model-len", "10M"], "context"),
        (["--max-model-len", "16"], "below"),
        (["--max-gpus", "0"], "positive"),
        (["--max-accuracy-loss", "-1"], "percent"),
        (["--max-accuracy-loss", "low"], "percentage"),
        (["--tensor-parallel", "3"], "heads"),
        (["--tensor-parallel", "0"], "positive"),
        (["--tensor-parallel", "two"], "number"),
        (["--pipeline-parallel", "33"], "layers"),
        (["--on", "3x"], "GPU"),
        (["--on", "2xrtx-9090"], "rtx-"),
        (["--on", "0xrtx-4090"], "0"),
        (["--fabric-gbps", "-1", "--on", "2x8xh100-sxm"], "positive"),
        (["--catalog", "/nonexistent/dir"], "/nonexistent/dir"),
        (["--goal", "throughput"], "--budget"),
        (["--goal", "throughput", "--rate", "2"], "--rate"),
        (["--time-limit", "soon"], "time-limit"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_one_clear_line_and_exit_2(capsys, tmp_path, extra, mentions):
    base = {"--model": ["solve"]}.get(extra[0], SOLVE)
    if extra[0] in ("--gpu", "--on", "--region", "--fabric-gbps"):
        base = SOLVE[:-2]
    code, out, err = outcome(capsys, [*base, *extra, "--out", tmp_path / "plan"])
    assert code == 2, err
    assert out == ""
    assert err.startswith("planner: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert mentions.lower() in err.lower(), err
    assert not (tmp_path / "plan").exists()


HOSTILE = {
    "empty": b"",
    "truncated": b'{"model_type": "llama", "hidden_size": 40',
    "binary": bytes(range(256)) * 8,
    "list": b"[1, 2, 3]",
    "string": b'"llama"',
    "nested": b"[" * 5000 + b"]" * 5000,
    "strings-for-numbers": b'{"model_type": "llama", "hidden_size": "big", "num_hidden_layers": {}, "vocab_size": null}',
    "negative": b'{"model_type": "llama", "hidden_size": -1, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10, "intermediate_size": 8}',
    "absurd": b'{"model_type": "llama", "hidden_size": 1e300, "num_hidden_layers": 1e18, "num_attention_heads": 2, "vocab_size": 10, "intermediate_size": 8}',
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_config(capsys, tmp_path, name):
    file = tmp_path / "config.json"
    file.write_bytes(HOSTILE[name])
    code, out, err = outcome(capsys, ["solve", "--model", file])
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_missing_config(capsys, tmp_path):
    code, out, err = outcome(capsys, ["solve", "--model", tmp_path / "nothing.json"])
    assert (code, out) == (2, "")
    assert "nothing.json" in err


@pytest.mark.parametrize(
    ("text", "mentions"), [("::: {{", "prices"), ("provider,instance\n", "prices"), ("\x00\x01", "prices")]
)
def test_broken_catalog_folder(capsys, tmp_path, text, mentions):
    (tmp_path / "prices").mkdir()
    (tmp_path / "prices" / "mine.csv").write_text(text)
    code, out, err = outcome(capsys, [*SOLVE, "--catalog", tmp_path])
    assert (code, out) == (2, "")
    assert mentions in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "content", ["", "just words", "{", "schema_version: 99\n", "schema_version: 1\nstatus: optimal\n", "[]", "\x00"]
)
def test_broken_plan_file(capsys, tmp_path, content):
    file = tmp_path / "plan.yaml"
    file.write_text(content)
    code, out, err = outcome(capsys, ["emit", file, "--out", tmp_path / "out"])
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_plan_is_exit_3_with_the_explanation(capsys, tmp_path):
    code, out, _ = outcome(capsys, [*SOLVE, "--latency", "1ms", "--out", tmp_path / "plan"])
    assert code == 3
    assert "clash" in out
    assert "TTFT" in out
    assert not (tmp_path / "plan").exists()
    code, out, _ = outcome(capsys, [*SOLVE, "--latency", "1ms", "--json"])
    tree = json.loads(out)
    assert code == 3
    assert tree["status"] == "infeasible"
    assert {"limit", "from", "to"} <= set(tree["infeasible"]["relaxations"][0])


def test_interrupted_run_leaves_nothing(capsys, tmp_path, monkeypatch):
    import planner.emit

    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(planner.emit, "render", interrupted)
    monkeypatch.setattr(planner.emit, "write_files", interrupted)
    code, _, err = outcome(capsys, [*SOLVE, "--out", tmp_path / "plan"])
    assert code == 130
    assert err.count("\n") == 1
    assert not (tmp_path / "plan").exists()


def test_a_full_or_forbidden_disk_is_one_line(capsys, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    code, _, err = outcome(capsys, [*SOLVE, "--out", blocked / "plan"])
    assert code == 2
    assert err.count("\n") == 1
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("shell", ["| head -1", ">&-", "2>&- >&-"])
def test_output_that_nobody_reads_is_no_fault(shell: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m planner solve --model 8b --on 1xh100-sxm {shell}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in ((0, 141) if "head" in shell else (0,)), "141 where the reader left before the end"
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["; rm -rf /", "org/", "org/na me", "[red]x[/red]", "a--b/c..d", "org/" + 97 * "x"])
def test_what_cannot_be_a_hub_id_is_an_unknown_model(name: str) -> None:
    command = [sys.executable, "-m", "planner", "solve", "--model", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "unknown model" in done.stderr

"""solve says which options limit the latency where none was given, on the console alone."""

from __future__ import annotations

import json

import pytest

from planner.cli.main import run

SOLVE = ["solve", "--model", "8b", "--on", "1xh100-sxm", "--engine", "vllm"]
HINT = "No latency was limited"


def printed(capsys, *words):
    assert run([*SOLVE, *words]) == 0
    return capsys.readouterr().out


def test_a_request_without_a_latency_limit_gets_one_line(capsys):
    lines = [line for line in printed(capsys).splitlines() if HINT in line]
    assert len(lines) == 1
    assert all(option in lines[0] for option in ("--latency", "--tpot", "--e2e"))


@pytest.mark.parametrize("words", [["--latency", "5s"], ["--tpot", "1s"], ["--e2e", "60s"], ["--goal", "fastest"]])
def test_a_limit_or_the_fastest_answer_needs_no_hint(capsys, words):
    assert HINT not in printed(capsys, *words)


def test_json_and_training_have_none(capsys):
    assert HINT not in json.dumps(json.loads(printed(capsys, "--json")))
    assert (
        run(["solve", "--task", "train", "--model", "1b", "--tokens", "1M", "--seq-len", "1024", "--on", "1xh100-sxm"])
        == 0
    )
    assert HINT not in capsys.readouterr().out

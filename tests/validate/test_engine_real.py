"""The command on real engines, on CPU: tiny random models served and trained from the emitted files.

Two quick ones run by default; the rest are slow. vLLM lives in an environment of its own (PLANNER_VLLM_PYTHON).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.cli.main import run
from planner.plan import Plan, load_plan
from tests.emit.plans import owned, plan, with_model
from tests.emit.test_real_parsers import interpreter
from tests.emit.test_serve_cpu import MAKE_MODEL
from tests.train_emit.plans import tiny
from tests.train_runs.runs import need
from tests.train_runs.tinymodel import make
from tests.validate.engine_helpers import left_over, saved

LIMITS = {"ttft_s": 5.0, "tpot_s": 1.0, "e2e_s": 20.0}
QUIET = ["--env", "OMP_NUM_THREADS=1", "--env", "HF_HUB_OFFLINE=1", "--timeout", "6m"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and text for training."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny")
    make(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that engines serve."""
    python = interpreter("PLANNER_HEAVY_PYTHON", "transformers")
    folder = tmp_path_factory.mktemp("served") / "tiny llama"
    subprocess.run([python, "-c", MAKE_MODEL, str(folder)], check=True, timeout=300, capture_output=True)
    return folder


def tiny_plan(engine: str, seqs: int = 4, rate: float = 4.0) -> Plan:
    made = plan("8b", engine, offers=(owned("rtx-3090", 1),), seqs=seqs, length=512, tokens=512, share=None)
    work = {"input_tokens": 64, "output_tokens": 16, "rate_per_s": rate, "concurrency": None}
    made = with_model(replace(made, model=replace(made.model, name="tiny")), "tiny/llama")
    return replace(made, request={"model": "tiny", "workload": work, "limits": LIMITS})


def measure(made: Plan, model: Path, place: Path, capsys: Any, *words: str) -> dict[str, Any]:
    """The plan's validation after the command."""
    path = saved(made, place)
    command = [
        "validate",
        str(path),
        "--level",
        "engine",
        "--cpu",
        "--model-path",
        str(model),
        "--json",
        *QUIET,
        *words,
    ]
    code = run(command)
    out, err = capsys.readouterr()
    assert code == 0, err
    written = load_plan(path).validation
    assert written == json.loads(out)["validation"]
    assert left_over(str(model)) == []
    return written


def on_path(python: str) -> list[str]:
    return ["--env", f"PATH={Path(python).parent}:{os.environ['PATH']}", "--env", "PYTHONPATH="]


def check_training(validation: dict[str, Any]) -> None:
    measured = validation["measured"]
    assert validation["steps"] == 4
    assert 0 < measured["step_time_s"] < 60
    assert measured["tokens_per_s_per_gpu"] == pytest.approx(measured["tokens_per_s"] / 2, rel=1e-4)
    assert measured["peak_host_gib"] > 0.1


@need("torch", "transformers", "accelerate")
def test_fsdp2_on_two_processes(tiny_model: Path, tmp_path: Path, capsys: Any) -> None:
    made = tiny("fsdp2", zero_stage=3)
    check_training(measure(made, tiny_model / "model", tmp_path, capsys, "--steps", "6", *on_path(sys.executable)))


@pytest.mark.slow
@need("torch", "transformers", "accelerate", "deepspeed")
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_on_two_processes(stage: int, tiny_model: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["--steps", "6", "--dataset", str(tiny_model / "text.txt"), *on_path(sys.executable)]
    check_training(measure(tiny("deepspeed", zero_stage=stage), tiny_model / "model", tmp_path, capsys, *words))


def test_transformers_in_batches(tiny_llama: Path, tmp_path: Path, capsys: Any) -> None:
    python = interpreter("PLANNER_HEAVY_PYTHON", "transformers")
    found = measure(tiny_plan("transformers"), tiny_llama, tmp_path, capsys, "--requests", "12", *on_path(python))
    assert found["requests"] == 12
    assert found["requests_failed"] == 0
    assert 0 < found["measured"]["ttft_ms"] < found["measured"]["e2e_ms_p99"]
    assert found["limits"]["TTFT, 95th percentile"]["verdict"] == "cannot say"  # 12 requests are too few
    assert found["limits"]["E2E, mean"]["verdict"] == "held"
    assert found["measured"]["input_tokens_mean"] == pytest.approx(64, abs=4)


@pytest.mark.slow
def test_transformers_serve_streams(tiny_llama: Path, tmp_path: Path, capsys: Any) -> None:
    python = interpreter("PLANNER_VLLM_PYTHON", "uvicorn")  # has transformers[serving]
    made = tiny_plan("transformers", seqs=1, rate=1.0)
    found = measure(made, tiny_llama, tmp_path, capsys, "--requests", "12", *on_path(python))
    assert found["requests"] == 12
    assert found["measured"]["ttft_ms"] > 1
    assert found["measured"]["tpot_ms"] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("client", ["own", "vllm"])
def test_vllm(client: str, tiny_llama: Path, tmp_path: Path, capsys: Any) -> None:
    python = interpreter("PLANNER_VLLM_PYTHON", "vllm")
    more = [
        "--env",
        "EXTRA_ARGS=--enforce-eager",
        "--env",
        "VLLM_NO_USAGE_STATS=1",
        "--bench",
        client,
        "--requests",
        "50",
    ]
    found = measure(tiny_plan("vllm"), tiny_llama, tmp_path, capsys, *more, *on_path(python))
    measured = found["measured"]
    assert found["requests"] == 50
    assert measured["kv_cache_tokens"] > 1000
    assert measured["output_tokens_mean"] == 16
    assert measured["ttft_ms_p50"] < measured["e2e_ms_p50"]
    assert {v["verdict"] for v in found["limits"].values()} == {"held"}

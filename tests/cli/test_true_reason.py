"""Where a precision, a KV dtype or an engine does not go with the GPU, that is what is said, with what does go."""

from __future__ import annotations

import pytest

from planner.cli.main import run

MODEL = ["--model", "llama-3.1-8b"]
CASES = [
    (["--gpu", "a100-sxm-80", "--precision", "fp8"], "fp8 weights do not run on a100-sxm-80 with any engine; there they run bf16"),
    (["--gpu", "h100-sxm", "--precision", "nvfp4", "--engine", "vllm"], "nvfp4 weights do not run on h100-sxm with vllm; there it runs bf16"),
    (["--gpu", "mi300x", "--precision", "nvfp4"], "nvfp4 weights do not run on mi300x"),
    (["--gpu", "a100-sxm-80", "--engine", "sglang", "--kv-cache-dtype", "fp8"], "fp8 KV caches do not run on a100-sxm-80 with sglang; there it runs bf16"),
    (["--gpu", "h100-sxm", "--precision", "int8-w8a8", "--kv-cache-dtype", "fp16"], "fp16 KV caches do not go with int8-w8a8 weights"),
    (["--gpu", "mi300x", "--engine", "tensorrt_llm"], "tensorrt_llm does not run on mi300x: its vendor is amd, not nvidia"),
    (["--gpu", "t4", "--engine", "tensorrt_llm"], "tensorrt_llm does not run on t4: its compute capability is 7.5, below 8"),
    (["--gpu", "v100-sxm2-32"], "no engine runs on v100-sxm2-32: its compute capability is 7, below 7.5"),
]  # fmt: skip


def words(text):
    """Text without the line breaks of a console."""
    return " ".join(text.split())


@pytest.mark.parametrize(("options", "said"), CASES)
def test_solve_names_it(capsys, options, said):
    assert run(["solve", *MODEL, *options]) == 3
    shown = words(capsys.readouterr().out)
    assert said in shown
    assert "no machine matches" not in shown


@pytest.mark.parametrize("command", ["memory", "estimate"])
def test_one_configuration_names_it_too(capsys, command):
    assert run([command, *MODEL, "--gpu", "a100-sxm-80", "--precision", "fp8"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "fp8 weights do not run on a100-sxm-80 with vllm; there it runs bf16" in shown


def test_experts_name_the_engine_that_cannot(capsys):
    assert (
        run(["memory", "--model", "mixtral-8x7b", "--gpu", "h100-sxm", "--engine", "tgi", "--precision", "bnb-nf4"])
        == 2
    )
    assert "a mixture of experts does not run in bnb-nf4 on h100-sxm with tgi" in capsys.readouterr().err


def test_training_names_the_precision_and_no_price(capsys):
    assert (
        run(["solve", "--task", "train", *MODEL, "--gpu", "a100-sxm-80", "--precision", "fp8", "--tokens", "10M"]) == 3
    )
    shown = words(capsys.readouterr().out)
    assert "a100-sxm-80 has no fp8 tensor cores" in shown
    assert "dearer offer" not in shown


def test_a_pinned_pipeline_is_planned_even_where_it_is_deeper_than_the_memory_needs(capsys):
    asked = ["--model", "70b", "--on", "8xh100-sxm", "--pp", "4", "--precision", "fp8"]
    assert run(["estimate", *asked]) == 0
    assert "TP 2, PP 4" in words(capsys.readouterr().out)
    assert run(["solve", *asked]) == 0
    assert "PP 4" in words(capsys.readouterr().out)

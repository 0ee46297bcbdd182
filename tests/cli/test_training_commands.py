"""Training through the commands."""

import json

import pytest

from planner.cli.main import run

JOB = ["--task", "train", "--model", "llama-3.1-8b", "--tokens", "100M", "--seq-len", "2048"]
ON = ["--on", "8xa100-sxm-80"]


def output(capsys, arguments, code=0):
    got = run([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert got == code, err
    return out


def test_solve_and_round_trip(capsys):
    tree = json.loads(output(capsys, ["solve", *JOB, *ON, "--json"]))
    assert tree["task"] == "train"
    assert tree["status"] == "optimal"
    assert {
        "method",
        "zero_stage",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "checkpoint_interval",
        "offload",
    } <= set(tree["deployment"]["train"])
    assert {"step_time_s", "tokens_per_s_per_gpu", "mfu", "total_time_h"} <= set(tree["predicted"])
    from planner.plan import plan_from_dict, plan_to_dict

    assert plan_to_dict(plan_from_dict(tree)) == tree


def test_compare_estimate_memory(capsys):
    rows = json.loads(output(capsys, ["compare", *JOB, "--provider", "lambda", "--json"]))
    costs = [r["cost"]["usd_total"] for r in rows]
    assert len(rows) > 3
    assert costs == sorted(costs)
    assert "MFU" in output(capsys, ["estimate", *JOB, *ON, "--framework", "deepspeed"])
    parts = json.loads(output(capsys, ["memory", *JOB[:4], *ON, "--zero-stage", "3", "--json"]))
    assert parts["fits"]
    assert {name for name, _ in parts["parts"]} >= {"weights", "gradients", "optimizer", "activations"}


@pytest.mark.parametrize(
    ("extra", "mentions"),
    [
        (["--goal", "throughput"], "goal"),
        (["--method", "lorra"], "lora"),
        (["--optimizer", "adam"], "adamw"),
        (["--precision", "fp4"], "fp"),
        (["--tokens", "-1"], "positive"),
        (["--samples", "10"], "either"),
        (["--global-batch", "2M..1M"], "backwards"),
        (["--global-batch", "100"], "sequence"),
        (["--zero-stage", "4"], "0 to 3"),
        (["--offload", "disk"], "offload"),
        (["--lora-rank", "8"], "adapters"),
        (["--latency", "200ms"], "serve"),
        (["--seq-len", "1000000"], "context"),
        (["--deadline", "24"], "unit"),
        (["--framework", "deepsped"], "deepspeed"),
    ],
)
def test_bad_input(capsys, extra, mentions):
    words = ["solve", *JOB, *ON]
    if extra[0] in words:
        at = words.index(extra[0])
        words[at : at + 2] = []
    code = run([*words, *extra])
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    assert mentions in err


def test_training_options_do_not_pass_silently_in_serving(capsys):
    assert run(["solve", "--model", "8b", "--deadline", "24h"]) == 2
    assert "--task train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--cp", "3"], "--context-parallel 3: "),
        (["--checkpoint-interval", "999"], "--checkpoint-interval 999: a checkpoint every 999 layers in stages of 32"),
        (["--micro-batch-size", "1000000000"], "--micro-batch-size 1000000000: the global batch has at most"),
        (["--dp", "7"], "--data-parallel 7: 8 GPUs are not divisible by 7"),
        (
            ["--cp", "8", "--framework", "deepspeed"],
            "--context-parallel 8: DeepSpeed with the Hugging Face Trainer has no",
        ),
        (
            ["--zero-stage", "1", "--framework", "fsdp2"],
            "--zero-stage 1: PyTorch FSDP2 with accelerate has no ZeRO stage 1",
        ),
    ],
)
def test_an_impossible_pin_is_named_with_its_reason(capsys, extra, words):
    tree = json.loads(output(capsys, ["solve", *JOB, *ON, *extra, "--json"], 3))
    assert any(line.startswith(words) for line in tree["infeasible"]["core"]), tree["infeasible"]["core"]
    assert not any("x)" in line for line in tree["infeasible"]["core"])


def test_samples_longer_than_the_sequence_need_packing(capsys):
    job = [
        "--task",
        "train",
        "--model",
        "llama-3.1-8b",
        "--samples",
        "1000",
        "--sample-tokens",
        "9000",
        "--seq-len",
        "4096",
    ]
    assert run(["solve", *job, *ON, "--no-packing"]) == 2
    assert "a sample of 9000 tokens does not fit a sequence of 4096" in capsys.readouterr().err
    output(capsys, ["solve", *job, *ON, "--json"])

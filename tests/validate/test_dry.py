"""The dry run counts what the closed forms say, and the command takes a plan and gives it back validated."""

import importlib.util
import json
import sys
from dataclasses import replace

import pytest

from planner.cli.main import run
from planner.errors import InvalidValueError, MissingExtraError, ModelConfigError
from planner.models.lookup import find
from planner.plan import load_plan, plan_to_yaml
from planner.validate import dry, dry_model
from planner.validate.dry_train import Counted, Rank, count, layers_to_count, line

TINY = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 704, "vocab_size": 4096, "max_position_embeddings": 4096,
}  # fmt: skip
TINY_PARAMS = 2 * 4096 * 256 + 256 + 4 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 704 + 512)
FSDP = Rank("fsdp2", 8, 3, 1, 512, True, "bf16", False, False)
GIB = 2**30

needs_torch = pytest.mark.skipif(
    not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")),
    reason="torch and transformers are the extra 'profile'",
)


def plans(tmp_path_factory, name, words):
    folder = tmp_path_factory.mktemp(name)
    config = folder / "config.json"
    config.write_text(json.dumps(TINY))
    assert run(["solve", "--model", str(config), *words, "--out", str(folder / "plan")]) == 0
    return load_plan(folder / "plan" / "plan.yaml")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    words = ["--task", "train", "--tokens", "1M", "--seq-len", "512", "--on", "1x8xh100-sxm", "--framework", "fsdp2",
             "--zero-stage", "3", "--micro-batch-size", "2", "--checkpoint-interval", "1", "--cp", "1"]  # fmt: skip
    return plans(tmp_path_factory, "train", [*words, "--global-batch", "16seq", "--offload", "none"])


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return plans(
        tmp_path_factory, "serve", ["--on", "1x2xl40s", "--engine", "vllm", "--tp", "2", "--precision", "bf16"]
    )


def test_a_line_through_two_counts():
    low, high = (Counted(n, 2 * n, 3 * n, 10 + 7 * n, {"act": n}) for n in (8.0, 16.0))
    at = line({8: low, 16: high}, 40)
    assert (at.weights, at.gradients, at.optimizer, at.peak, at.parts) == (40, 80, 120, 290, {"act": 40})
    assert at.rest == 290 - 160
    assert line({8: low}, 8) is low


def test_small_models_are_counted_whole():
    assert layers_to_count(32, FSDP) == (32,)
    assert layers_to_count(80, FSDP) == (16, 32)
    assert layers_to_count(32, replace(FSDP, engine="ddp", stage=0)) == (8, 16)


def test_without_torch_the_extra_is_named(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"llm-hardware-planner\[profile\]"):
        dry.dry_run(trained)


@pytest.mark.parametrize(
    ("settings", "deployment", "why"),
    [
        ({"method": "lora"}, {}, "full training"),
        ({"offload": "optimizer"}, {}, "offload"),
        ({"checkpoint_interval": 2}, {}, "several layers"),
        ({"zero_stage": 1}, {}, "ZeRO-1"),
        ({}, {"engine": "torchtitan"}, "torchtitan"),
        ({}, {"tensor_parallel": 2}, "tensor parallelism"),
        ({}, {"pipeline_parallel": 2}, "pipeline"),
    ],
)
def test_what_is_not_counted_is_refused_in_words(trained, settings, deployment, why):
    changed = replace(trained.deployment, train=replace(trained.deployment.train, **settings), **deployment)
    with pytest.raises(InvalidValueError, match=why):
        dry.dry_run(replace(trained, deployment=changed))


def test_the_config_is_the_registrys_or_the_local_file(trained):
    assert dry_model.raw_config(trained)["hidden_size"] == 256
    lost = replace(trained, request={**trained.request, "model": "nobody/knows"})
    with pytest.raises(ModelConfigError, match=r"no config\.json"):
        dry_model.raw_config(lost)
    other = replace(trained, request={**trained.request, "model": "deepseek-r1"})
    with pytest.raises(InvalidValueError, match="deepseek_v3"):
        dry_model.raw_config(other)


@needs_torch
@pytest.mark.parametrize("checkpointing", [True, False])
def test_states_of_a_tiny_model_are_the_closed_form(checkpointing):
    got = count(TINY, 4, replace(FSDP, checkpointing=checkpointing))
    assert got.weights == pytest.approx(4 * TINY_PARAMS / 8, rel=0.01)
    assert got.gradients == pytest.approx(4 * TINY_PARAMS / 8, rel=0.01)
    assert got.optimizer == pytest.approx(8 * TINY_PARAMS / 8, rel=0.01)


@needs_torch
def test_peak_of_a_tiny_model_is_the_closed_form():
    """Peak at the gradient of the logits: gathered root and layer, three fp32 copies of the logits, layer inputs."""
    tokens, vocab, hidden = 512, 4096, 256
    got = count(TINY, 4, FSDP)
    states = 12 * TINY_PARAMS / 8
    root, layer = 2 * 2 * vocab * hidden, 2 * (TINY_PARAMS - 2 * vocab * hidden) / 4
    logits = tokens * vocab * 3 * 4
    assert got.peak == pytest.approx(states + root + layer + logits + 4 * 2 * tokens * hidden, rel=0.05)


@needs_torch
def test_checkpointing_and_sharding_lower_the_count():
    peak = {c: count(TINY, 4, replace(FSDP, checkpointing=c)).peak for c in (True, False)}
    assert peak[True] < peak[False]
    whole = count(TINY, 4, replace(FSDP, engine="ddp", stage=0))
    assert whole.weights == 4 * TINY_PARAMS
    assert whole.optimizer == 8 * TINY_PARAMS


@needs_torch
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_holds_its_18_bytes(stage):
    got = count(TINY, 4, replace(FSDP, engine="deepspeed", stage=stage, several=True))
    whole = 2 * TINY_PARAMS if stage == 2 else 2 * TINY_PARAMS / 8
    assert got.weights == pytest.approx(whole, rel=0.01)
    assert got.gradients + got.optimizer == pytest.approx((18 if stage == 2 else 16) * TINY_PARAMS / 8, rel=0.01)


@needs_torch
def test_the_group_and_the_masks_are_left_as_found():
    import torch
    from transformers.models.llama import modeling_llama

    before = modeling_llama.create_causal_mask
    count(TINY, 1, FSDP)
    assert modeling_llama.create_causal_mask is before
    assert not torch.distributed.is_initialized()
    assert torch.get_default_dtype() == torch.float32


@needs_torch
def test_flops_of_8b_are_the_known_ones():
    from planner.validate.dry_flops import training_flops

    raw = find("llama-3.1-8b")[0]["config"]
    for checkpointing, tflop in ((False, 210.8), (True, 261.4)):
        got = training_flops(raw, 32, batch=1, tokens=4096, checkpointing=checkpointing) / 1e12
        assert got == pytest.approx(tflop, rel=0.001)


@needs_torch
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_training_plan_goes_round(trained, tmp_path, capsys, suffix):
    file, out = tmp_path / "plan.yaml", tmp_path / f"out.{suffix}"
    file.write_text(plan_to_yaml(trained))
    assert run(["validate", str(file), "--level", "dry", "--json", "--out", str(out)]) == 0
    tree = json.loads(capsys.readouterr().out)
    rows = {p["part"]: p for p in tree["parts"]}
    for name in ("weights", "gradients after backward", "optimizer"):
        assert rows[name]["counted"] == pytest.approx(rows[name]["predicted"], abs=0.0006), "plans round to 0.001 GiB"
    back = load_plan(out)
    assert back.validation["level"] == "dry"
    got = rows["tensors at the peak"]["error_percent"]
    assert back.validation["error_percent"]["tensors at the peak"] == pytest.approx(got, abs=0.01)
    assert replace(back, validation=None) == trained


@needs_torch
def test_a_serving_plan_is_counted(served, tmp_path, capsys):
    file = tmp_path / "plan.yaml"
    file.write_text(plan_to_yaml(served))
    assert run(["validate", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "one of 2 tensor-parallel ranks" in shown
    found = {p.name: p for p in dry.dry_run(served).parts}
    for name in ("KV cache", "FLOPs of a prefill", "FLOPs of a decode step"):
        assert abs(found[name].error_percent) < 1, name


def test_bad_input_is_one_line(tmp_path, capsys):
    assert run(["validate", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run(["validate", str(tmp_path / "none.yaml"), "--level", "wet"]) == 2
    assert "unknown level of validation 'wet'" in capsys.readouterr().err


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize(("checkpointing", "gib"), [(True, 19.2), (False, 42.7)])
def test_peak_of_8b_on_eight_ranks(checkpointing, gib):
    """Counted with the same tracker on another day: torch 2.13, fp32 masters, bf16 compute, 1 x 4096 tokens."""
    raw = find("llama-3.1-8b")[0]["config"]
    got = count(raw, 32, Rank("fsdp2", 8, 3, 1, 4096, checkpointing, "bf16", False, False))
    assert got.peak / GIB == pytest.approx(gib, rel=0.1)


@needs_torch
@pytest.mark.slow
def test_peak_is_linear_in_layers():
    raw = find("llama-3.1-8b")[0]["config"]
    counted = {n: count(raw, n, Rank("fsdp2", 8, 3, 1, 4096, True, "bf16", False, False)) for n in (8, 16, 32)}
    assert line({n: counted[n] for n in (8, 16)}, 32).peak == pytest.approx(counted[32].peak, rel=0.01)

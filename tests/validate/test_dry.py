"""The dry run counts what the closed forms say, and the command takes a plan and gives it back validated."""

import importlib.util
import json
import sys
from dataclasses import replace

import pytest

from planner.cli.main import run
from planner.errors import InvalidValueError, MissingExtraError, ModelConfigError
from planner.models.lookup import find
from planner.plan import Deployment, TrainSettings, load_plan, plan_to_yaml
from planner.validate import dry, dry_model
from planner.validate.dry_rank import Lora, Rank, Stage, stages_of_plan
from planner.validate.dry_train import Counted, count, layers_to_count, line

TINY = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 704, "vocab_size": 4096, "max_position_embeddings": 4096,
}  # fmt: skip
TINY_PARAMS = 2 * 4096 * 256 + 256 + 4 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 704 + 512)
FSDP = Rank("fsdp2", 8, 3, 1, 512, 1, "bf16", False, False)
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
    low, high = (
        Counted(n, 2 * n, 3 * n, ({"act": 10 + 7 * n}, {"grad": 9 * n}), {"all-gather": n}) for n in (8.0, 16.0)
    )
    at = line({8: low, 16: high}, 40)
    assert (at.weights, at.gradients, at.optimizer, at.traffic) == (40, 80, 120, {"all-gather": 40})
    assert (at.peak, at.parts, low.parts) == (360, {"grad": 360}, {"grad": 72})
    assert at.rest == 360 - 160
    assert line({8: low}, 8) is low


def test_each_moment_has_its_own_line():
    """At few layers the logits are highest, at many the end of backward."""
    low, high = (Counted(0, 0, 0, ({"act": 100 + n}, {"grad": 9 * n})) for n in (8.0, 16.0))
    assert (low.peak, high.peak, line({8: low, 16: high}, 40).peak) == (108, 144, 360)


def test_small_models_are_counted_whole():
    assert layers_to_count(17, FSDP) == (17,)
    assert layers_to_count(80, FSDP) == (8, 16)
    assert layers_to_count(32, replace(FSDP, engine="ddp", stage=0)) == (8, 16)
    assert layers_to_count(35, replace(FSDP, interval=4)) == (11, 19), "the remainder of the groups stays"


def test_without_torch_the_extra_is_named(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"\.\[profile\]"):
        dry.dry_run(trained)


@pytest.mark.parametrize(
    ("settings", "deployment", "why"),
    [
        ({"method": "qlora"}, {}, "4-bit kernels"),
        ({"optimizer": "adamw-8bit"}, {}, "states of adamw-8bit"),
        ({"zero_stage": 1}, {}, "no ZeRO stage 1"),
        ({}, {"engine": "torchtitan"}, "torchtitan builds its own model"),
        ({}, {"context_parallel": 2}, "context parallelism"),
        ({}, {"expert_parallel": 2}, "expert parallelism"),
        ({"method": "lora"}, {"engine": "deepspeed", "tensor_parallel": 2}, "adapters"),
        ({}, {"precision": "fp8"}, "fp8"),
    ],
)
def test_what_is_not_counted_is_refused_in_words(trained, settings, deployment, why):
    changed = replace(trained.deployment, train=replace(trained.deployment.train, **settings), **deployment)
    with pytest.raises(InvalidValueError, match=why):
        dry.dry_run(replace(trained, deployment=changed))


def test_experts_over_tensor_ranks_are_refused():
    from planner.validate.dry_rank import refuse

    train = TrainSettings("full", 1, 1, 1, 1, "none", "adamw", 512, 8, 10)
    dep = Deployment("deepspeed", "0", "bf16", "bf16", 2, 1, 4, 1, 1, 8, (), train=train)
    refuse(dep, "llama")
    with pytest.raises(InvalidValueError, match="AutoTP does not cut experts"):
        refuse(dep, "mixtral")


def test_stages_of_a_pipeline_are_those_that_can_be_worst():
    train = TrainSettings("full", 1, 1, 8, 1, "none", "adamw", 512, 8, 10, layers_per_stage=(8, 8, 9, 7))
    dep = Deployment("deepspeed", "0", "bf16", "bf16", 1, 4, 2, 1, 1, 8, (), train=train)
    found = [(s.layers, s.rank.first, s.rank.last, s.rank.in_flight) for s in stages_of_plan(dep, train, 32)]
    assert found == [(8, True, False, 4), (9, False, False, 2), (7, False, True, 1)]


def test_a_request_for_another_model_is_refused(trained):
    other = replace(trained, request={**trained.request, "model": "llama-3.2-1b"})
    with pytest.raises(InvalidValueError, match="names another model"):
        dry.dry_run(other)


def test_the_config_is_the_registrys_or_the_local_file(trained):
    assert dry_model.raw_config(trained)["hidden_size"] == 256
    lost = replace(trained, request={**trained.request, "model": "nobody/knows"})
    with pytest.raises(ModelConfigError, match=r"no config\.json"):
        dry_model.raw_config(lost)
    other = replace(trained, request={**trained.request, "model": "deepseek-r1"})
    with pytest.raises(InvalidValueError, match="deepseek_v3"):
        dry_model.raw_config(other)


@needs_torch
@pytest.mark.parametrize("interval", [0, 1, 2, 4])
def test_states_of_a_tiny_model_are_the_closed_form(interval):
    got = count(TINY, 4, replace(FSDP, interval=interval))
    assert got.traffic["reduce-scatter"] == pytest.approx(2 * TINY_PARAMS, rel=0.01)
    assert got.traffic["all-gather"] == pytest.approx(4 * TINY_PARAMS, rel=0.01)
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
    narrow = {**TINY, "vocab_size": 256}
    peak = {k: count(narrow, 8, replace(FSDP, interval=k, seq_len=2048)).peak for k in (1, 4, 0)}
    assert peak[1] < peak[4] < peak[0]
    whole = count(TINY, 4, replace(FSDP, engine="ddp", stage=0))
    assert whole.weights == 4 * TINY_PARAMS
    assert whole.optimizer == 8 * TINY_PARAMS


@needs_torch
@pytest.mark.parametrize(("stage", "a_rank"), [(0, 20), (1, 4 + 16 / 8), (2, 2 + 18 / 8), (3, 18 / 8)])
def test_deepspeed_holds_its_18_bytes(stage, a_rank):
    got = count(TINY, 4, replace(FSDP, engine="deepspeed", stage=stage, several=True))
    assert got.weights + got.gradients + got.optimizer == pytest.approx(a_rank * TINY_PARAMS, rel=0.01)


@needs_torch
def test_deepspeed_buckets_are_whole_however_small_the_model():
    bucket = 2 * 5e8
    assert count(TINY, 2, replace(FSDP, engine="deepspeed", stage=1)).parts["oth"] == bucket
    assert count(TINY, 2, replace(FSDP, engine="deepspeed", stage=2)).parts["oth"] == pytest.approx(
        2 * bucket, rel=0.01
    )


@needs_torch
def test_live_parameters_of_stage_3_are_all_of_a_small_model_and_capped_for_a_large_one():
    small = count(TINY, 4, replace(FSDP, engine="deepspeed"))
    assert small.parts["live parameters"] == pytest.approx(2 * TINY_PARAMS, rel=0.02)
    once = small.derived_each["all-gather"] + small.derived["all-gather"]
    assert once == 2 * TINY_PARAMS, "kept from forward to backward; small vectors are gathered once a step"
    large = count(find("llama-3.1-8b")[0]["config"], 16, replace(FSDP, engine="deepspeed", interval=0))
    assert large.parts["live parameters"] == pytest.approx(2e9, rel=0.1), "stage3_max_live_parameters in 16 bit"


@needs_torch
def test_stage_2_makes_its_gradients_in_backward_and_all_reduces_them():
    one = count(TINY, 4, replace(FSDP, engine="deepspeed", stage=2))
    two = count(TINY, 4, replace(FSDP, engine="deepspeed", stage=2, several=True))
    assert one.gradients == two.gradients == pytest.approx(2 * TINY_PARAMS / 8, rel=0.01)
    assert two.peak - one.peak == pytest.approx(2 * TINY_PARAMS / 8, rel=0.2), (
        "those of the first micro-batch are still there"
    )
    assert one.derived_each == {"all-reduce": 2 * TINY_PARAMS}


@needs_torch
def test_offloaded_states_are_off_the_device():
    on = count(TINY, 4, replace(FSDP, engine="deepspeed", stage=2))
    off = count(TINY, 4, replace(FSDP, engine="deepspeed", stage=2, offload="optimizer"))
    assert (off.optimizer, off.gradients) == (0, 0)
    assert on.peak - off.peak == pytest.approx(16 * TINY_PARAMS / 8, rel=0.05), (
        "no gradients yet when logits are highest"
    )
    away = count(TINY, 4, replace(FSDP, offload="optimizer+parameters"))
    assert (away.weights, away.optimizer) == (0, 0)


@needs_torch
def test_tensor_ranks_hold_their_share_and_reduce_four_times_a_layer():
    rank = replace(FSDP, engine="deepspeed", stage=1, world=2, tensor=2, interval=0)
    got, hidden = count(TINY, 4, rank), 2 * 512 * 256
    layer = TINY_PARAMS / 4 - 2 * 4096 * 256 / 4
    whole = 4096 * 256 * (1 + 1 / 2) + 4 * layer / 2
    assert got.weights == pytest.approx(2 * whole, rel=0.02), "the embedding is whole, the head is cut"
    assert got.traffic["all-reduce"] == 4 * 4 * hidden
    assert got.traffic["all-gather"] == 2 * 512 * 4096, "logits are gathered"
    again = count(TINY, 4, replace(rank, interval=1)).traffic["all-reduce"]
    assert again == 4 * 5 * hidden, "recomputation stops before the last all-reduce of a layer"


@needs_torch
def test_adapters_alone_are_trained():
    lora = Lora(8, ("q_proj", "v_proj"), True)
    got, adapters = count(TINY, 4, replace(FSDP, lora=lora)), 4 * 8 * (2 * 256 + 256 + 128)
    assert got.weights == pytest.approx((2 * TINY_PARAMS + 4 * adapters) / 8, rel=0.02)
    assert got.gradients == pytest.approx(4 * adapters / 8, rel=0.05)
    assert got.optimizer == pytest.approx(8 * adapters / 8, rel=0.05)
    for engine, stage in (("ddp", 0), ("deepspeed", 2)):
        assert count(TINY, 2, replace(FSDP, engine=engine, stage=stage, lora=replace(lora, fp32=False))).peak > 0


@needs_torch
def test_a_first_stage_holds_its_micro_batches_in_flight():
    rank = replace(FSDP, engine="deepspeed", stage=1, interval=0, last=False)
    one, three = (count(TINY, 4, replace(rank, in_flight=n)) for n in (1, 3))
    assert three.parts["act"] > 2.5 * one.parts["act"]
    last = count(TINY, 4, replace(rank, first=False, last=True))
    assert one.weights == pytest.approx(2 * (TINY_PARAMS - 4096 * 256), rel=0.01)
    assert last.weights == pytest.approx(2 * (TINY_PARAMS - 4096 * 256), rel=0.01)


@needs_torch
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_are_counted_by_their_rows(kind):
    raw = {**TINY, "model_type": kind, "moe_intermediate_size": 704, "num_local_experts": 4, "num_experts": 4,
           "num_experts_per_tok": 2, "head_dim": 64}  # fmt: skip
    from planner.validate.dry_flops import training_flops

    rank = replace(FSDP, interval=0)
    assert count(raw, 2, rank).weights > count(TINY, 2, rank).weights
    more = {**raw, "num_experts_per_tok": 4}
    extra = training_flops(more, Stage(2, rank)) - training_flops(raw, Stage(2, rank))
    assert extra == 3 * 2 * 2 * 512 * (2 * 3 * 256 * 704), "layers, multiply-add, tokens, two experts more"


@needs_torch
def test_a_chunked_loss_never_makes_whole_logits():
    whole, parts = (count(TINY, 2, replace(FSDP, seq_len=2048, chunk=c)) for c in (0, 256))
    assert whole.peak - parts.peak > 6 * 2048 * 4096


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
    for interval, tflop in ((0, 210.8), (1, 261.4)):
        got = training_flops(raw, Stage(32, replace(FSDP, seq_len=4096, interval=interval))) / 1e12
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
    assert tree["tolerance_percent"] == 5
    assert back.validation["beyond_tolerance"] == tree["beyond_tolerance"]
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
@pytest.mark.parametrize(("interval", "gib"), [(1, 19.2), (0, 42.7)])
def test_peak_of_8b_on_eight_ranks(interval, gib):
    """Counted with the same tracker on another day: torch 2.13, fp32 masters, bf16 compute, 1 x 4096 tokens."""
    raw = find("llama-3.1-8b")[0]["config"]
    got = count(raw, 32, replace(FSDP, seq_len=4096, interval=interval))
    assert got.peak / GIB == pytest.approx(gib, rel=0.1)


@needs_torch
@pytest.mark.slow
def test_peak_is_linear_in_layers():
    raw = find("llama-3.1-8b")[0]["config"]
    counted = {n: count(raw, n, replace(FSDP, seq_len=4096)) for n in (8, 16, 32)}
    assert line({n: counted[n] for n in (8, 16)}, 32).peak == pytest.approx(counted[32].peak, rel=0.01)

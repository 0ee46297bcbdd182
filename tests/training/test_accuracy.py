"""Replay of published training rows: what is read, what is skipped with a reason, and that predictions are near."""

from __future__ import annotations

import pytest

from planner.validate.accuracy_memory import replay as replay_memory
from planner.validate.accuracy_training import replay, replay_memory_training
from planner.validate.training_cases import half_of, read_case
from tests.training.helpers import CATALOG

FOUNDRY = {  # mosaicml/llm-foundry scripts/train/benchmarking/README.md, 8x A100-80GB
    "model": "MPT-760m",
    "params_b": "0.7581",
    "layers": "24",
    "hidden": "1536",
    "ffn": "6144",
    "heads": "12",
    "kv_heads": "12",
    "vocab": "50368",
    "seq_len": "512",
    "gpu": "A100-80GB",
    "n_gpus": "8",
    "tp": "1",
    "pp": "1",
    "cp": "1",
    "dp": "8",
    "ep": "1",
    "zero_or_fsdp_stage": "fsdp FULL_SHARD (zero3)",
    "micro_batch": "96",
    "global_batch": "1536",
    "interleave": "1",
    "recompute": "none",
    "precision": "amp_bf16",
    "optimizer": "DecoupledAdamW(fp32 states)",
    "offload": "none",
    "metric": "tokens_per_s_per_gpu",
    "value": "29446",
    "source": "mosaicml/llm-foundry@8c8dd48f README.md",
    "task": "pretrain",
    "notes": "flash attn",
}


def test_a_row_is_predicted_near_its_value_with_an_interval():
    got = replay([FOUNDRY])[0]
    assert got.predicted == pytest.approx(29446, rel=0.25)
    assert got.low < got.predicted < got.high


def test_rate_and_mfu_of_one_row_agree():
    rate, mfu = replay([FOUNDRY, {**FOUNDRY, "metric": "mfu", "value": "0.4507"}])
    per_token = 6 * 0.7581e9 + 12 * 24 * 1536 * 512
    assert mfu.predicted == pytest.approx(rate.predicted * per_token / 312e12, rel=0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"notes": "SUSPECT"}, "SUSPECT"),
        ({"value": "OOM"}, "out of memory"),
        ({"micro_batch": ""}, "micro-batch"),
        ({"gpu": "GPU-of-2031"}, "catalog"),
        ({"task": "prefix-tuning"}, "LoRA"),
        ({"layers": ""}, "dimensions"),
        ({"source": "nobody/nothing@1"}, ""),
        ({"notes": "cumulative technique: Sorcery"}, "Sorcery"),
    ],
)
def test_rows_that_say_too_little_are_skipped_with_a_reason(change, words):
    got = replay([{**FOUNDRY, **change}])[0]
    if words:
        assert got.predicted is None
        assert words in got.skipped
    else:  # an unknown source is read by its sharding
        assert got.predicted is not None


def test_the_measured_value_does_not_steer_the_prediction():
    assert replay([FOUNDRY])[0] == replay([{**FOUNDRY, "value": "1"}])[0]


def test_the_stated_parameter_count_decides_two_or_three_matrices():
    gated = {**FOUNDRY, "params_b": "0.985"}
    assert read_case(FOUNDRY, CATALOG).model.layers[0].mlp.gated is False
    assert read_case(gated, CATALOG).model.layers[0].mlp.gated is True


def test_halves_split_by_group_and_not_by_row():
    assert half_of(FOUNDRY) == half_of({**FOUNDRY, "seq_len": "2048", "value": "3"})
    assert {half_of({**FOUNDRY, "model": f"m{i}"}) for i in range(20)} == {0, 1}


def memory_row(**change: str) -> dict[str, str]:
    row = {
        "id": "F1/peak",
        "task": "train",
        "model": "mistralai/Mistral-7B-v0.1",
        "quant": "lora bfloat16",
        "gpu": "A100-80GB",
        "n_gpus": "1",
        "batch": "4",
        "outcome": "fits",
        "metric": "peak_alloc_gib",
        "value": "24.87",
        "source": "foundation-model-stack/fms-acceleration:scripts/benchmarks/refs/a100_80gb.csv",
        "note": "framework=none grad-checkpointing flash-attn2 ga=1. 4094 tok/sample",
    }
    return {**row, **change}


def test_fine_tuning_memory_of_a_public_benchmark():
    """fms-acceleration: Mistral-7B LoRA on an A100, 4,094 tokens: 24.87 GiB at batch 4, 36.08 at 8."""
    rows = [memory_row(), memory_row(batch="8"), memory_row(metric="steady_alloc_gib")]
    assert [p.predicted for p in replay_memory_training(rows)] == pytest.approx([24.87, 36.08, 13.66], rel=0.03)
    assert [p.predicted for p in replay_memory(rows)] == [p.predicted for p in replay_memory_training(rows)]


def test_memory_rows_of_other_kinds_are_skipped():
    rows = [
        memory_row(task="infer"),
        memory_row(note="framework=none grad-checkpointing flash-attn2 ga=1."),
        memory_row(source="nobody/nothing#1"),
        memory_row(metric="kv_gib"),
    ]
    assert all(p.predicted is None and p.skipped for p in replay_memory_training(rows))

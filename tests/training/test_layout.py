"""Legality of training layouts: one layout in words and many at once follow the same rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.engines.training import framework, frameworks
from planner.errors import UnknownNameError
from planner.request import OPTIMIZERS, TrainJob
from planner.space.train_layout import job_problem, layout_problem, legal
from planner.space.train_rows import TrainRows, compact
from tests.training.helpers import hardware, model, row

ALL = list(frameworks().values())
LLAMA, MOE = model("llama-3.1-8b"), model("qwen3-30b-a3b")

one_row = st.tuples(
    st.integers(0, len(ALL) - 1),
    st.sampled_from([0, 1, 2, 3, 4, 8, 16]),
    st.sampled_from([1, 2, 3, 5, 8, 40]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 6, 8]),
    st.sampled_from([1, 2, 8]),
    st.integers(0, 3),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([0, 1, 2, 50]),
    st.integers(0, 2),
)


@settings(max_examples=60)
@given(
    st.lists(one_row, min_size=1, max_size=20),
    st.sampled_from([LLAMA, MOE]),
    st.sampled_from(["full", "lora", "qlora"]),
    st.booleans(),
)
def test_vector_and_single_agree(rows, spec, method, joined):
    hw = hardware("a100-sxm-80", fabric="ib-200g" if joined else None)
    job = TrainJob(method=method, seq_len=4096)
    got = legal(spec, job, hw, ALL, TrainRows.of(rows))
    assert got.tolist() == [layout_problem(spec, job, ALL[r[0]], hw, r) is None for r in rows]


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("deepspeed", row("deepspeed", pp=2, ga=4, zero=2, dp=2), "ZeRO-2 with pipeline"),
        ("deepspeed", row("deepspeed", tp=3, zero=1, dp=2), "do not divide the attention heads"),
        ("megatron_bridge", row("megatron_bridge", tp=16), "crosses machines"),
        ("megatron_bridge", row("megatron_bridge", pp=4, ga=2), "fewer micro-batches"),
        ("megatron_bridge", row("megatron_bridge", ep=2, dp=2), "no experts"),
        ("fsdp2", row("fsdp2", tp=2, zero=3), "no tensor parallelism"),
        ("deepspeed", row("deepspeed", dp=2, zero=1, offload="optimizer+parameters"), "cannot offload"),
        ("deepspeed", row("deepspeed", zero=3), "nothing to shard"),
        ("torchtitan", row("torchtitan", dp=2, zero=3, k=2), "every layer or none, not every 2"),
        ("deepspeed", row("deepspeed", pp=4, ga=4, zero=1, dp=2, k=9), "every 9 layers in stages of 8"),
        ("torchtitan", row("torchtitan", cp=3, zero=3), "not divisible"),
        ("megatron_bridge", row("megatron_bridge", pp=64, ga=64), "64 pipeline stages for 32 layers"),
    ],
)  # fmt: skip
def test_reasons_are_words(name, layout, words):
    assert words in (layout_problem(LLAMA, TrainJob(seq_len=4096), framework(name), hardware(), layout) or "")


def test_qlora_does_not_go_with_deepspeed_zero3():
    job, hw = TrainJob(method="qlora"), hardware()
    assert "4-bit" in (layout_problem(LLAMA, job, framework("deepspeed"), hw, row("deepspeed", dp=2, zero=3)) or "")
    assert layout_problem(LLAMA, job, framework("fsdp2"), hw, row("fsdp2", dp=2, zero=3)) is None


def test_more_than_one_machine_needs_a_network():
    assert "network" in (
        layout_problem(LLAMA, TrainJob(), framework("fsdp2"), hardware(fabric=None), row("fsdp2", dp=16, zero=3)) or ""
    )


@pytest.mark.parametrize(
    ("job", "gpu", "words"),
    [
        (TrainJob(precision="fp8"), "a100-sxm-80", "fp8"),
        (TrainJob(precision="bf16"), "v100-sxm2-32", "bf16"),
        (TrainJob(seq_len=1 << 20), "h100-sxm", "context"),
        (TrainJob(optimizer="muon"), "h100-sxm", "muon"),
    ],
)
def test_jobs_a_framework_cannot_do(job, gpu, words):
    reasons = [
        job_problem(LLAMA, job, f, hardware(gpu).gpu) for f in (framework("torchtitan"), framework("megatron_bridge"))
    ]
    assert all(words in (r or "") for r in reasons)


def test_every_optimizer_is_offered_by_someone():
    assert set(OPTIMIZERS) == {o for f in ALL for o in f.optimizers}


def test_unknown_framework_names_the_nearest():
    with pytest.raises(UnknownNameError, match="deepspeed"):
        framework("deepspede")


@given(st.lists(st.tuples(st.integers(-3, 9), st.integers(0, 2_000_000), st.integers(1, 3)), min_size=1, max_size=50))
def test_compact_restores_the_columns(rows):
    columns = tuple(np.array(c, dtype=np.int64) for c in zip(*rows, strict=True))
    distinct, inverse = compact(*columns)
    for column, values in zip(columns, distinct, strict=True):
        assert (values[inverse] == column).all()
    assert len(distinct[0]) == len(set(rows))

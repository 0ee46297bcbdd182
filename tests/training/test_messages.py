"""Bytes of messages of a step, against what FSDP2 and AutoTP were counted to send (docs/validate.md)."""

import numpy as np
import pytest

from planner.engines.training import stacks
from planner.estimator.time.train_traffic import step_messages
from planner.request import TrainJob
from planner.space.train_rows import TrainRows
from tests.training.helpers import model, row

LLAMA, JOB = model("llama-3.1-8b"), TrainJob(seq_len=4096)
BYTES = 2.0 * LLAMA.params_total


def messages(name, **layout):
    got = step_messages(LLAMA, JOB, stacks()[name], TrainRows.of([row(name, **layout)]))
    return {kind: float(v[0]) for kind, v in got.items() if v[0]}


@pytest.mark.parametrize(
    ("name", "zero", "ga", "expected"),
    [
        ("fsdp2", 3, 4, {"all-gather": 8, "reduce-scatter": 4}),
        ("fsdp2", 2, 4, {"all-gather": 4, "reduce-scatter": 4}),
        ("deepspeed", 0, 4, {"all-reduce": 1}),
        ("deepspeed", 1, 4, {"all-gather": 1, "reduce-scatter": 1}),
        ("deepspeed", 2, 4, {"all-gather": 1, "reduce-scatter": 4}),
        ("ddp", 0, 4, {"all-reduce": 2}),
    ],
)
def test_messages_in_units_of_16_bit_weights(name, zero, ga, expected):
    got = messages(name, dp=8, zero=zero, ga=ga)
    assert {kind: value / BYTES for kind, value in got.items()} == pytest.approx(expected, rel=0.001)


@pytest.mark.parametrize(("interval", "times"), [(0, 4), (1, 5), (2, 5.5), (4, 5.75)])
def test_all_reduces_of_tensor_parallelism(interval, times):
    got = messages("deepspeed", dp=1, tp=4, zero=0, k=interval)
    assert got["all-reduce"] == pytest.approx(times * 32 * 2 * 4096 * 4096)
    assert got["all-gather"] == pytest.approx(2 * 4096 * LLAMA.vocab), "logits of a head that is not tied"


def test_megatron_recomputes_whole_layers():
    assert messages("megatron_bridge", tp=4, dp=1, k=1)["all-reduce"] == pytest.approx(6 * 32 * 2 * 4096 * 4096)


def test_hops_of_a_pipeline():
    assert messages("deepspeed", pp=4, dp=1, ga=8)["p2p"] == pytest.approx(2 * 8 * 2 * 4096 * 4096)


def test_one_rank_sends_nothing():
    assert messages("ddp") == {}
    assert np.isfinite(BYTES)

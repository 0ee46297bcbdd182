"""Bytes of messages of a step, against what FSDP2 and AutoTP were counted to send (docs/validate.md)."""

import numpy as np
import pytest

from planner.engines.training import stacks
from planner.estimator.time.train_gathers import gathered_elements, module_sizes
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
        ("deepspeed", 1, 4, {"all-gather": 1, "all-reduce": 1}),
        ("deepspeed", 2, 4, {"all-gather": 1, "all-reduce": 4}),
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


def gathered(layers, interval, *, live=1e9, reuse=1e9, head=0.5e9, tied=False):
    return gathered_elements(
        layers, embedding=0.5e9, head=head, tied=tied, interval=interval, live=live, reuse=reuse
    )  # fmt: skip


@pytest.mark.parametrize("interval", [0, 1, 2])
def test_zero_3_does_not_gather_again_what_lives_through_the_turn(interval):
    """20 layers of 0.2e9: twice, but for the two that live beside the head; the embedding twice, the head once."""
    assert gathered([[0.1e9, 0.1e9]] * 20, interval, head=0.6e9) == pytest.approx(2 * 4e9 + 2 * 0.5e9 + 0.6e9 - 0.4e9)


def test_zero_3_gathers_a_small_model_once_and_a_long_checkpoint_again():
    assert gathered([[0.1e9]] * 2, 1, live=2e9) == pytest.approx(1.2e9)
    assert gathered([[0.1e9]] * 2, 1, live=2e9, tied=True) == pytest.approx(0.7e9)
    plain = 2 * 4e9 + 1.5e9
    assert gathered([[0.2e9]] * 20, 10) == pytest.approx(plain + 2 * (2e9 - 1e9)), (
        "of each checkpoint all but the last 1e9"
    )
    assert gathered([[0.2e9]] * 20, 10, reuse=0) == gathered([[0.2e9]] * 20, 10), "live is the stronger rule"
    assert gathered([[0.2e9, 1.4e9]] * 4, 1) == pytest.approx(2 * 6.4e9 + 1.5e9 + 4 * 0.2e9), (
        "experts stay, attention goes"
    )


def test_modules_of_a_layer_add_up_to_its_weights():
    for name in ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b"):
        spec = model(name)
        for layer, _ in spec.layer_groups:
            assert sum(module_sizes(layer, spec.hidden)) == pytest.approx(layer.params(spec.hidden), rel=0.001), name


def test_zero_3_of_8b_gathers_less_than_twice_and_of_fsdp_twice():
    got = [messages("deepspeed", dp=8, zero=3, k=k)["all-gather"] for k in (0, 1, 2, 16)]
    assert got[0] / BYTES == pytest.approx(1.88, abs=0.01)
    assert got[3] > 1.2 * got[1]
    assert messages("fsdp2", dp=8, zero=3, k=16)["all-gather"] / BYTES == pytest.approx(2)

"""Measured all-reduces of NVSwitch machines, and the law where nobody measured."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.estimator.time.all_reduce import switch_reduce
from planner.estimator.time.collectives import all_reduce_s, fabric
from planner.hardware.catalog import load_catalog

LINKS = load_catalog().links
SWITCH5, SWITCH4 = LINKS["nvswitch-nvlink5"], LINKS["nvswitch-nvlink4"]
MIB = 2**20


def time_us(surface, link, ranks, message):
    return float(switch_reduce([surface], [link], [ranks]).time_s(np.array([[float(message)]]))[0, 0]) * 1e6


def law_us(link, ranks, message):
    return float(all_reduce_s(fabric([link], [ranks]), np.array([[float(message)]]))[0, 0]) * 1e6


# aiconfigurator-core 0.12.0, bf16, bytes = twice its elements: the faster of vLLM 0.24 and TensorRT-LLM 1.3.0rc20 in a CUDA graph
@pytest.mark.parametrize(
    ("surface", "link", "ranks", "message", "measured"),
    [
        ("b200", SWITCH5, 8, 2 * MIB, 20.7),
        ("b200", SWITCH5, 2, 2 * MIB, 8.0),
        ("h200", SWITCH4, 8, 2 * MIB, 18.1),
        ("h100", SWITCH4, 4, 2**17, 4.3),
    ],
)
def test_measured_messages_take_the_measured_time(surface, link, ranks, message, measured):
    assert time_us(surface, link, ranks, message) == pytest.approx(measured, rel=0.02)


@given(st.sampled_from(["h100", "h200"]), st.sampled_from([2, 4, 8]), st.integers(8, 33))
def test_a_message_twice_as_large_takes_at_most_about_twice_as_long(surface, ranks, log_size):
    one, two = (time_us(surface, SWITCH4, ranks, 2**x) for x in (log_size, log_size + 1))
    assert 0.85 * one < two < 2.6 * one


def test_another_link_or_gpu_follows_the_law():
    slower = replace(SWITCH4, name="nvswitch-of-another-make")
    for surface, link in (("h100", slower), ("l40s", LINKS["pcie4-p2p"]), ("h100", LINKS["pcie5-p2p"])):
        assert time_us(surface, link, 8, MIB) == pytest.approx(law_us(link, 8, MIB))


def test_more_ranks_than_measured_grow_as_the_law_says():
    rack = LINKS["nvlink5-nvl72"]
    seen, wide = time_us("gb200", rack, 4, 16 * MIB), time_us("gb200", rack, 32, 16 * MIB)
    assert wide / seen == pytest.approx(law_us(rack, 32, 16 * MIB) / law_us(rack, 4, 16 * MIB), rel=0.3)
    assert wide > seen


def test_one_rank_reduces_nothing():
    found = switch_reduce(["b200", "b200"], [None, SWITCH5], [1, 2]).time_s(np.array([1.0 * MIB]))
    assert found[0, 0] == 0
    assert found[1, 0] > 0

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.estimator.time.collectives import all_gather_s, all_reduce_s, all_to_all_s, fabric, p2p_s, reduce_scatter_s
from tests.time.facts import BRIDGE, LINKS, NVLINK3, PCIE4, PCIE4_HOST, RDMA, XGMI

ALL = (all_reduce_s, all_gather_s, reduce_scatter_s, all_to_all_s, p2p_s)
MIB = 2**20


def time(link, ranks, size, what=all_reduce_s):
    return float(what(fabric([link], [ranks]), size)[0, 0])


def busbw_gb_per_s(link, ranks, size):
    return 2 * (ranks - 1) / ranks * size / time(link, ranks, size) / 1e9


# All-reduce on A100 with NVSwitch, VIA-Research/vTrain@f8dda84 trace/a100
@pytest.mark.parametrize(
    ("ranks", "mib", "measured"), [(8, 16, 126.3), (8, 64, 202.5), (8, 1024, 229.4), (4, 64, 185.1), (2, 256, 184.4)]
)
def test_nvswitch_is_near_the_measurement(ranks, mib, measured):
    assert busbw_gb_per_s(NVLINK3, ranks, mib * MIB) == pytest.approx(measured, rel=0.5)


# NVIDIA GTC24 s62129: 24 GB/s on PCIe 4.0, 48 GB/s on one 400 Gb NIC
@pytest.mark.parametrize(("link", "measured"), [(PCIE4, 24), (RDMA, 48)])
def test_large_messages_reach_the_published_bus_bandwidth(link, measured):
    assert busbw_gb_per_s(link, 2, 1024 * MIB) == pytest.approx(measured, rel=0.1)


@given(st.sampled_from(LINKS), st.sampled_from([2, 4, 8]), st.integers(3, 29), st.sampled_from(ALL))
def test_more_bytes_never_take_less_time(link, ranks, log_size, what):
    assert 0 < time(link, ranks, 2**log_size, what) < time(link, ranks, 2 ** (log_size + 1), what)


@given(st.sampled_from(LINKS), st.sampled_from(ALL))
def test_one_rank_has_nothing_to_say(link, what):
    assert time(link, 1, MIB, what) == 0
    assert time(None, 1, MIB, what) == 0


def test_small_messages_are_latency():
    assert time(NVLINK3, 8, 16384) == pytest.approx(time(NVLINK3, 8, 1024), rel=0.25)


def test_a_bridge_is_an_island_of_two():
    assert busbw_gb_per_s(BRIDGE, 2, 256 * MIB) > 150
    assert busbw_gb_per_s(BRIDGE, 4, 256 * MIB) < 30


def test_a_shared_root_thins_out_beyond_four():
    for link in (PCIE4, PCIE4_HOST):
        assert busbw_gb_per_s(link, 8, 64 * MIB) < 0.8 * busbw_gb_per_s(link, 4, 64 * MIB)
    assert busbw_gb_per_s(PCIE4_HOST, 4, 64 * MIB) < busbw_gb_per_s(PCIE4, 4, 64 * MIB)


def test_a_mesh_gives_two_peers_one_wire():
    assert busbw_gb_per_s(XGMI, 2, 1024 * MIB) == pytest.approx(busbw_gb_per_s(XGMI, 8, 1024 * MIB) / 7, rel=0.1)


def test_columns_are_independent():
    both = all_reduce_s(fabric([NVLINK3, PCIE4], [8, 4]), np.array([[MIB, 8 * MIB]]))
    assert both[1] == pytest.approx(all_reduce_s(fabric([PCIE4], [4]), np.array([[MIB, 8 * MIB]]))[0])

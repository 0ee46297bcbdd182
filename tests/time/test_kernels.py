from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InvalidValueError
from planner.estimator.time.engine_time import ATTENTION_FAMILIES
from planner.estimator.time.kernels import (
    CacheShape,
    MoeShape,
    constants,
    decode_attention_s,
    devices,
    engine_constants,
    every_expert_tokens,
    gemm_s,
    moe_s,
    peak_flops,
    prefill_attention_s,
    rows_in_tiles,
    streaming_s,
    touched_share,
)
from planner.estimator.time.surfaces import Stack, axes, surface_of, table_of
from planner.hardware.catalog import load_catalog
from planner.models.precision import precision
from tests.time.facts import A100, B200, BF16, FP8, H100, H200, INT4, RTX4090, gpu, shard

TOKENS = np.exp2(np.arange(14))[None, :]


def one(value):
    return np.array([float(value)])


def gemm(shard_, m, n, k):
    return gemm_s(devices([shard_]), np.array([[float(m)]]), one(n), one(k))[0, 0]


def test_surface_is_exact_on_its_grid():
    grid = [2**a for a in axes()["gemm"]]
    stack = Stack.build("gemm", [("h100", "bf16")])
    found = stack.efficiency(one(grid[0][3]), one(grid[1][4]), grid[2][None, :])
    assert found[0] == pytest.approx(2 ** table_of("h100", "gemm", "bf16")[3, 4])


def test_both_ways_of_interpolating_agree():
    stack = Stack.build("gemm", [("h100", "bf16"), ("a100", "bf16")])
    n, k, m = np.array([3000.0, 700.0]), np.array([5000.0, 9000.0]), np.array([[3.0, 300.0, 3000.0]])
    grid = stack.efficiency(np.repeat(n[:, None], 3, 1), np.repeat(k[:, None], 3, 1), np.repeat(m, 2, 0))
    assert stack.efficiency(n, k, m) == pytest.approx(grid)


# aiconfigurator-core 0.12.0 gemm_perf, H100 SXM, bf16, vLLM 0.24: 60.8 us at m=1, 876 us at m=4096 for n=10240, k=8192 (off the grid)
@pytest.mark.parametrize(("m", "measured_us"), [(1, 60.8), (64, 58.2), (1024, 211.7), (4096, 876.3)])
def test_gemm_is_near_the_measurement(m, measured_us):
    assert gemm(shard(H100, BF16), m, 10240, 8192) * 1e6 == pytest.approx(measured_us, rel=0.15)


@given(st.integers(0, 13), st.sampled_from([512, 1536, 8192, 30000]), st.sampled_from([512, 3000, 16384]))
def test_gemm_never_beats_the_roofline_by_much(log_m, n, k):
    m = 2**log_m
    for s in (shard(H100, BF16), shard(H200, FP8), shard(A100, BF16)):
        width = s.precision.bits / 8
        roof = max(
            2 * m * n * k / peak_flops(s.gpu, s.precision.compute_dtype),
            (width * n * k) / (s.gpu.bandwidth_gb_per_s * 1e9),
        )
        assert gemm(s, m, n, k) > 0.9 * roof


def test_four_bit_weights_help_small_batches_only():
    assert gemm(shard(RTX4090, INT4), 1, 8192, 8192) < 0.5 * gemm(shard(RTX4090, BF16), 1, 8192, 8192)
    assert gemm(shard(RTX4090, INT4), 8192, 8192, 8192) > gemm(shard(RTX4090, BF16), 8192, 8192, 8192)


def test_experts_touched_grow_with_the_batch():
    dev = devices([shard(H100, BF16)])
    shape = MoeShape(64, 4, 2048, True, one(1408), one(1))
    stack = dev.moe("vllm")
    few, many = (moe_s(dev, stack, np.array([[m]]), shape)[0, 0] for m in (1.0, 64.0))
    assert 3 < many / few < 16  # 4 experts of 64 against nearly all


def test_expert_parallel_divides_the_experts():
    dev = devices([shard(H100, BF16), shard(H100, BF16)])
    shape = MoeShape(64, 4, 2048, True, np.array([1408.0, 1408.0]), np.array([1.0, 8.0]))
    time = moe_s(dev, dev.moe("vllm"), np.array([[4096.0]]), shape)[:, 0]
    assert time[1] < time[0] / 2


def test_window_bounds_prefill_attention():
    dev = devices([shard(H100, BF16)])
    full, window = (prefill_attention_s(dev, 32768.0, one(32), 256, w)[0, 0] for w in (None, 1024))
    assert window < full / 4


def test_missing_dtype_is_an_error_not_a_guess():
    with pytest.raises(InvalidValueError, match="a100-sxm-80 has no fp8"):
        devices([shard(A100, FP8)])


def test_sixteen_bit_stands_in_for_itself():
    turing = gpu("t4", "turing", 320, None, fp16=65)
    assert peak_flops(turing, "bf16") == 65e12


def test_borrowed_surfaces_are_flagged():
    assert not surface_of(H100).borrowed
    assert surface_of(RTX4090).borrowed
    assert devices([shard(H100), shard(RTX4090)]).borrowed.tolist() == [False, True]


# aiconfigurator-core 0.12.0 moe_perf, H200, vLLM 0.24, experts of gpt-oss-120b (w4a16 mxfp4) on one GPU: 116 us for 4 tokens, 517 us for 64
@pytest.mark.parametrize(("tokens", "measured_us"), [(4, 116), (64, 512)])
def test_experts_of_a_measured_shape_take_the_measured_time_of_the_experts_that_are_touched(tokens, measured_us):
    dev = devices([shard(H200, precision("mxfp4"), 1)])
    shape = MoeShape(128, 4, 2880, True, one(2880), one(1))
    found = moe_s(dev, dev.moe("vllm"), np.array([[float(tokens)]]), shape)[0, 0]
    uniform = (
        1 - (1 - 4 / 128) ** tokens
    )  # as the measured routing is counted; the tokens of a batch are alike and touch fewer
    fewer = touched_share(np.array(float(tokens)), 128, 4) / uniform
    assert 0.75 < fewer < 1
    assert found * 1e6 == pytest.approx(measured_us * fewer, rel=0.03)


def test_the_experts_a_batch_touches():
    m = np.array([1.0, 2.0, 16.0, 1e4])
    share = touched_share(m, 128, 8)
    assert share[0] == pytest.approx(8 / 128)
    assert np.all(np.diff(share) > 0)
    assert share[-1] == pytest.approx(1)
    assert np.all(share <= 1 - (1 - 8 / 128) ** m)
    every = every_expert_tokens(128, 8)
    assert touched_share(np.array(every), 128, 8) == pytest.approx(0.99)
    assert every_expert_tokens(8, 8) == 1


def test_rows_of_products_come_in_tiles():
    m, tile = np.array([1.0, 64.0, 128.0, 192.0, 256.0, 1000.0]), np.array([64.0])
    assert rows_in_tiles(m, tile).tolist() == [1, 64, 128, 192 + 31.5 / 2, 256 + 31.5, 1000 + 31.5]
    assert rows_in_tiles(m, np.array([1.0])).tolist() == m.tolist()
    assert devices([shard(H100, BF16)]).tile.tolist() == [[64.0]]


def test_decode_attention_is_that_of_the_engines_own_kernels():
    dev = devices([shard(H200, BF16)])
    times = {
        family: decode_attention_s(
            dev, dev.decode(family), np.array([[64.0]]), 1024.0, CacheShape(one(8), 256, one(8192))
        )[0, 0]
        * 1e6
        for family in ATTENTION_FAMILIES
    }
    # aiconfigurator-core 0.12.0 generation_attention_perf, H200, 64 sequences, 64 heads on 8, 1024 tokens of context, bf16 cache
    assert times == pytest.approx({"vllm": 87.3, "sglang": 78.0, "trtllm": 92.6}, rel=0.1)


def test_experts_of_another_shape_or_spread_over_ranks_take_the_surface():
    dev = devices([shard(H200, precision("mxfp4"), 1)] * 3)
    known = MoeShape(128, 4, 2880, True, np.array([2880.0, 2881.0, 2880.0]), np.array([1.0, 1.0, 2.0]))
    found = moe_s(dev, dev.moe("vllm"), np.array([[64.0]]), known)[:, 0]
    assert found[1] != pytest.approx(found[0], rel=1e-3)
    assert found[1] == pytest.approx(found[0], rel=0.5)
    assert found[2] < found[0]


def test_block_scaled_activations_are_quantised_by_a_kernel_of_their_own():
    blocks, whole = (devices([shard(B200, precision(name), 1)]) for name in ("nvfp4", "fp8"))
    assert (blocks.scales_blocks[0, 0], whole.scales_blocks[0, 0]) == (1, 0)
    m, n = np.array([[64.0]]), one(8192)
    assert gemm_s(blocks, m, n, n)[0, 0] - gemm_s(blocks, m, n, n, 0.0)[0, 0] != 0
    bare = gemm_s(replace(blocks, scales_blocks=np.zeros((1, 1))), m, n, n)[0, 0]
    assert gemm_s(blocks, m, n, n)[0, 0] - bare == pytest.approx(
        streaming_s(blocks, m * 8192 * (2 + 0.5625))[0, 0], rel=0.02
    )


def test_streaming_is_measured_on_nvidia_gpus_only():
    gpus = load_catalog().gpus
    assert engine_constants(gpus["h200"])["streaming_efficiency"] > constants()["streaming_efficiency"]
    assert engine_constants(gpus["mi300x"]) == constants()
    assert (
        engine_constants(gpus["rtx-4090"])["streaming_floor_us"] == engine_constants(gpus["l40s"])["streaming_floor_us"]
    )

from dataclasses import replace

import numpy as np
import pytest

from planner.estimator.time.engine_steps import decode_step_s, mixed_extra_s
from planner.estimator.time.engine_time import engine_timing, timing_row
from planner.estimator.time.serving import LoadRows, serving_time
from planner.estimator.time.steps import step_table
from planner.request import Workload
from tests.time.facts import (
    A100,
    A100_PCIE,
    BF16,
    DEEPSEEK,
    FP8,
    H100,
    KV8,
    LLAMA31_70B,
    LLAMA_8B,
    MIXTRAL,
    NVLINK3,
    PCIE4,
    RDMA,
    RTX4090,
    VLLM,
    dense,
    engine,
    shard,
)

WORK = Workload(512, 256)
ZERO = np.array([0])


def step_ms(model, shard_, sequences=1.0, work=WORK, who=VLLM):
    table = step_table(model, [shard_], work)
    return float(decode_step_s(table, engine_timing([who]), ZERO, ZERO, np.array([sequences]))[0]) * 1e3


def test_llama_70b_single_stream():
    # public single-stream figures: 4x A100-SXM-80 bf16 31 ms (InternLM/lmdeploy@3e391df4 a100_fp16.md, batch 1); vLLM today 25-31
    assert 25 < step_ms(LLAMA31_70B, shard(A100, BF16, 4, link=NVLINK3)) < 31
    assert 15.5 < step_ms(LLAMA31_70B, shard(H100, FP8, 2)) < 19


# TensorRT-LLM 0.14 performance overview, Llama-3.1-70B fp16, 1000 in, 1000 out, saturated: tokens/s
@pytest.mark.parametrize(
    ("gpu", "link", "measured"), [(A100_PCIE, PCIE4, {4: 989, 8: 960}), (A100, NVLINK3, {4: 1763, 8: 3190})]
)
def test_tensor_parallel_on_pcie_stops_paying_at_four(gpu, link, measured):
    work = Workload(1000, 1000)
    table = step_table(LLAMA31_70B, [shard(gpu, BF16, tp, link=link) for tp in (4, 8)], work)
    slots = np.array([230, 680])  # KV cache beside 141 GB of weights on 4 and 8 cards of 80 GB, whole answers set aside
    rows = LoadRows(np.arange(2), np.zeros(2, int), None, slots.astype(float), np.full(2, 8192), slots)
    found = serving_time(table, [engine("tensorrt_llm", version="2024")], rows, work).max_rate_per_s * 1000
    assert found == pytest.approx([measured[4], measured[8]], rel=0.2)
    assert found[1] / found[0] == pytest.approx(measured[8] / measured[4], rel=0.2)


def test_tables_rise_with_tokens_and_sequences():
    shards = [shard(H100, FP8, 2), shard(A100, BF16, 8, link=NVLINK3), shard(RTX4090, BF16, 4, link=PCIE4)]
    for model in (LLAMA31_70B, MIXTRAL, DEEPSEEK):
        table = step_table(model, [s for s in shards if model is not DEEPSEEK or s.precision is BF16], WORK)
        assert np.all(np.diff(table.tokenwise_s, axis=1) >= 0)
        assert np.all(np.diff(table.decode_s, axis=1) >= 0)


def test_rows_of_a_table_do_not_depend_on_their_neighbours():
    shards = [shard(H100, FP8, 2), shard(A100, BF16, 8, link=NVLINK3), shard(H100, BF16, 4, kv=KV8)]
    whole, alone = step_table(MIXTRAL, shards, WORK), [step_table(MIXTRAL, [s], WORK) for s in shards]
    for i, table in enumerate(alone):
        assert whole.tokenwise_s[i] == pytest.approx(table.tokenwise_s[0])
        assert whole.decode_s[i] == pytest.approx(table.decode_s[0])
        assert whole.prefill_attention_s[i] == pytest.approx(table.prefill_attention_s[0])


def test_pipeline_stages_share_a_batch():
    one, four = shard(H100, BF16, 2), shard(H100, BF16, 2, pp=4, stage_link=RDMA)
    assert step_ms(LLAMA31_70B, four) == pytest.approx(step_ms(LLAMA31_70B, one), rel=0.1)  # a token passes every stage
    table = step_table(LLAMA31_70B, [one, four], WORK)
    rows = LoadRows(np.arange(2), np.zeros(2, int), np.full(2, 0.1), None, np.full(2, 8192))
    capacity = serving_time(table, [VLLM], rows, WORK).max_rate_per_s
    assert 2.5 < capacity[1] / capacity[0] <= 4.2


def test_uneven_stages_wait_for_the_fullest():
    model = dense("llama-81", 81, 8192, 64, 8, 28672, 32000)
    fair, uneven = (step_ms(m, shard(H100, BF16, 2, pp=8, stage_link=RDMA)) for m in (LLAMA31_70B, model))
    assert uneven > 1.06 * fair  # 11 layers on the fullest stage instead of 10


def test_a_window_bounds_the_cache_read():
    full, window = (dense("m", 32, 4096, 32, 8, 14336, 32000, window=w) for w in (None, 1024))
    work = Workload(16384, 256)
    assert step_ms(window, shard(H100, BF16), 64, work) < 0.7 * step_ms(full, shard(H100, BF16), 64, work)


def test_eight_bit_cache_is_read_faster():
    work = Workload(8192, 256)
    assert step_ms(LLAMA_8B, shard(H100, BF16, kv=KV8), 64, work) < step_ms(LLAMA_8B, shard(H100, BF16), 64, work)


def test_attention_groups_spare_latent_caches():
    plain, groups = shard(H100, FP8, 8, ep=8), shard(H100, FP8, 8, ep=8, adp=8)
    work = Workload(8192, 256)
    table = step_table(DEEPSEEK, [plain, groups], work)
    assert table.decode_s[1, 8] < table.decode_s[0, 8]  # every rank reads the latents of an eighth of the sequences


def test_a_prompt_is_one_attention_groups_alone():
    table, timing = step_table(DEEPSEEK, [shard(H100, FP8, 8, ep=8, adp=8)], WORK), engine_timing([VLLM])
    one, chunk = np.array([1.0]), np.array([8192.0])
    step = decode_step_s(table, timing, ZERO, ZERO, one)
    alone, many = (mixed_extra_s(table, timing, (ZERO, ZERO), (one, chunk, p), step)[0] for p in (8192.0, 1024.0))
    assert alone > 1.3 * many  # eight prompts of 1024 share the groups out, one of 8192 keeps seven of eight waiting
    plain = step_table(DEEPSEEK, [shard(H100, FP8, 8, ep=8)], WORK)
    whole, parts = (mixed_extra_s(plain, timing, (ZERO, ZERO), (one, chunk, p), step)[0] for p in (8192.0, 1024.0))
    assert whole == parts


def test_an_engine_that_prefills_first_spends_a_step_of_its_own():
    table = step_table(LLAMA_8B, [shard(H100, BF16)], WORK)
    mixing = engine_timing([engine("sglang")])
    first, together = (replace(mixing, prefill_first=np.array([v])) for v in (1.0, 0.0))
    for tokens in (16.0, 1024.0, 8192.0):
        load = np.array([64.0]), np.array([tokens]), tokens
        step = decode_step_s(table, mixing, ZERO, ZERO, load[0])
        own, mixed = (mixed_extra_s(table, t, (ZERO, ZERO), load, step)[0] for t in (first, together))
        assert own > mixed


def test_a_variant_has_the_constants_of_its_generation():
    base, variant = (timing_row("vllm", v) for v in ("today", "prompts in no graph"))
    assert variant["launch_us"] > base["launch_us"]
    assert {k for k in base if base[k] != variant[k]} <= {"launch_us", "fitted_on", "source", "date"}


def test_engines_without_graphs_pay_for_launches():
    assert (
        step_ms(LLAMA_8B, shard(H100, BF16), who=engine("transformers", "static"))
        > step_ms(LLAMA_8B, shard(H100, BF16)) + 1
    )


def mixed_ms(name, version, tokens, model=LLAMA_8B, precision_=BF16):
    """A step with one decoder, and what `tokens` of a prompt add to it."""
    table, timing = (
        step_table(model, [shard(H100, precision_, 1)], WORK),
        engine_timing([engine(name, version=version)]),
    )
    one = np.array([1.0])
    step = decode_step_s(table, timing, ZERO, ZERO, one)
    more = mixed_extra_s(table, timing, (ZERO, ZERO), (one, np.array([float(tokens)]), float(tokens)), step)
    return step[0] * 1e3, more[0] * 1e3


def launches_ms(kernels):
    """A step of TensorRT-LLM 1.0 with one sequence that waits for nothing but its launches."""
    row = timing_row("tensorrt_llm", "2025")
    return (kernels * row["launch_us"] + row["step_overhead_us"] + row["per_sequence_us"]) * 1e-3


def test_a_step_with_a_prompt_is_launched_kernel_by_kernel():
    step, short = mixed_ms("tensorrt_llm", "2025", 8)
    _, long = mixed_ms("tensorrt_llm", "2025", 8192)
    assert mixed_ms("tensorrt_llm", "2025", 0)[1] == 0
    assert step + short == pytest.approx(max(launches_ms(8 + 32 * 13), step), rel=0.01)
    assert long > 100  # 8192 tokens of an 8B: the launches are hidden behind the kernels
    assert mixed_ms("tensorrt_llm", "2025", 64)[1] == pytest.approx(short)


def test_quantisations_are_launched_too():
    _, plain = mixed_ms("tensorrt_llm", "2025", 8)
    step, low = mixed_ms("tensorrt_llm", "2025", 8, precision_=FP8)
    assert step + low == pytest.approx(launches_ms(8 + 32 * 17), rel=0.01)
    assert low > plain


def test_an_engine_that_does_not_fuse_quantisation_decodes_slower():
    table = step_table(LLAMA31_70B, [shard(H100, FP8, 2)], WORK)
    timing = engine_timing([engine("tensorrt_llm", version="2025")])
    many = np.array([32.0])
    without = decode_step_s(table, replace(timing, quantises_apart=np.zeros(1)), ZERO, ZERO, many)[0]
    more = decode_step_s(table, timing, ZERO, ZERO, many)[0] - without
    assert more * timing.decode_efficiency[0] == pytest.approx(table.quantising_time_s(ZERO, many)[0], rel=1e-6)
    assert 80 * 4 * 1.42e-6 < table.quantising_time_s(ZERO, many)[0] < 80 * 4 * 3e-6
    assert step_table(LLAMA31_70B, [shard(H100, BF16, 2)], WORK).quantising_s.max() == 0

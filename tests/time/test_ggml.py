"""Laws of llama.cpp's kernels, and single public facts with their sources."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InvalidValueError
from planner.estimator.time.ggml import gpu_rates, micro_batch_s, prompt_kernels_of, token_s
from planner.estimator.time.ggml_split import Host, pipeline_s, prompt_s
from planner.estimator.time.steps import weight_read_s
from planner.estimator.uncertainty import ranges
from planner.hardware.catalog import load_catalog
from planner.models.precision import kv_dtype, precision
from planner.space.shard import Shard
from planner.validate.accuracy_serving import replay
from tests.time.facts import LLAMA_8B, LLAMA_70B, MIXTRAL

CATALOG = load_catalog()
F16, Q4 = precision("bf16"), precision("gguf-q4_k_m")
FREE = Host(0.0, float("inf"), 4)


def on(gpu, stages=1, weights=Q4, tensor=1):
    card = CATALOG.gpus[gpu]
    link = CATALOG.links[card.default_link]
    return Shard(card, weights, kv_dtype("bf16"), tensor, stages, link if tensor > 1 else None, link if stages > 1 else None, 1, 1)  # fmt: skip


GPUS = st.sampled_from(["rtx-3090", "rtx-4090", "rtx-a6000", "l40s", "a100-pcie-80", "h100-pcie"])


@settings(max_examples=40, deadline=None)
@given(GPUS, st.integers(2, 8), st.sampled_from([F16, Q4]), st.integers(1, 8192))
def test_more_gpus_never_make_a_token_or_a_single_micro_batch_faster(gpu, stages, weights, context):
    one, many = on(gpu, 1, weights), on(gpu, stages, weights)
    assert token_s(LLAMA_8B, many, context) > token_s(LLAMA_8B, one, context)
    assert prompt_s(LLAMA_8B, many, 512, 512) >= prompt_s(LLAMA_8B, one, 512, 512)


@settings(max_examples=40, deadline=None)
@given(GPUS, st.sampled_from([F16, Q4]), st.integers(1, 30))
def test_a_longer_prompt_or_context_is_slower(gpu, weights, batches):
    shard = on(gpu, 1, weights)
    short, longer = (prompt_s(LLAMA_8B, shard, 512 * n, 512) for n in (batches, batches + 1))
    assert longer / (batches + 1) > short / batches  # each micro-batch sees more cache
    assert micro_batch_s(LLAMA_8B, shard, 512, 1024) > micro_batch_s(LLAMA_8B, shard, 512, 512)
    assert token_s(LLAMA_8B, shard, 512.0 * batches + 1) > token_s(LLAMA_8B, shard, 512.0 * batches)


@settings(max_examples=20, deadline=None)
@given(GPUS, st.sampled_from([F16, Q4]))
def test_no_token_is_faster_than_its_weights_are_read(gpu, weights):
    for model in (LLAMA_8B, LLAMA_70B):
        assert token_s(model, on(gpu, 1, weights), 1) > weight_read_s(model, on(gpu, 1, weights))


def test_four_bits_make_tokens_faster_and_prompts_slower():
    for gpu in ("rtx-4090", "h100-pcie"):
        four, sixteen = on(gpu, weights=Q4), on(gpu, weights=F16)
        assert token_s(LLAMA_8B, four, 512) < token_s(LLAMA_8B, sixteen, 512)
        assert prompt_s(LLAMA_8B, four, 512, 512) > prompt_s(LLAMA_8B, sixteen, 512, 512)  # unpacked first
        assert prompt_kernels_of(LLAMA_8B, four) == 32 * 50
        assert prompt_kernels_of(LLAMA_8B, sixteen) == 32 * 43


BATCHES = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=16)


@given(BATCHES, st.integers(1, 8), st.floats(1, 3000), st.floats(0, 1e-5), st.floats(100, 5000), st.floats(0, 0.01))
def test_a_pipeline_lies_between_the_ideal_and_one_after_the_other(batches, stages, kernels, kernel_s, queue, hop_s):
    host = Host(kernel_s, queue, 4)
    time = pipeline_s(batches, stages, kernels, hop_s, host)
    launches = len(batches) * stages * kernels * kernel_s
    assert time >= max(sum(batches) / stages, *batches) - 1e-9
    assert time <= sum(batches) + launches + len(batches) * (stages - 1) * hop_s + 1e-9
    assert pipeline_s(batches, stages, kernels, hop_s, replace(host, queue=2 * queue)) <= time + 1e-9
    assert pipeline_s([*batches, 0.01], stages, kernels, hop_s, host) >= time


@given(st.integers(1, 16), st.integers(1, 4))
def test_a_host_that_is_free_fills_the_pipeline(count, stages):
    assert pipeline_s([1.0] * count, stages, 100, 0, FREE) == pytest.approx((count + stages - 1) / stages if stages > 1 else count)  # fmt: skip


def test_a_queue_shorter_than_a_stage_leaves_little_of_the_pipeline():
    # 8 micro-batches on 4 GPUs: 11 stages of a quarter with long queues; with queues of half a stage the host waits half of each stage
    assert pipeline_s([1.0] * 8, 4, 1000, 0, FREE) == pytest.approx(11 / 4)
    assert pipeline_s([1.0] * 8, 4, 1000, 0, Host(0, 500, 4)) == pytest.approx((4 + 7 * 3.5) / 4)
    assert pipeline_s([1.0] * 8, 4, 1000, 0, Host(0, 0, 4)) == pytest.approx(8)


def test_geforce_accumulates_fp16_at_twice_its_listed_rate_and_inline_ecc_costs_bandwidth():
    assert gpu_rates(CATALOG.gpus["rtx-3090"]).flops == pytest.approx(142e12)  # NVIDIA GA102 whitepaper
    assert gpu_rates(CATALOG.gpus["rtx-a6000"]).flops == pytest.approx(154.8e12, rel=0.001)
    assert gpu_rates(CATALOG.gpus["a100-sxm-80"]).clocks == pytest.approx(108 * 1.41e9, rel=0.01)
    assert gpu_rates(CATALOG.gpus["l40s"]).bandwidth < 864e9
    assert gpu_rates(CATALOG.gpus["rtx-a6000"]).bandwidth == 768e9


def test_what_is_not_modelled_is_said():
    with pytest.raises(InvalidValueError, match="dense decoders"):
        token_s(MIXTRAL, on("rtx-4090"), 1)
    with pytest.raises(InvalidValueError, match="whole layers"):
        prompt_s(LLAMA_8B, on("rtx-4090", tensor=2), 512, 512)
    with pytest.raises(InvalidValueError, match="mi300x"):
        gpu_rates(CATALOG.gpus["mi300x"])


ROW = {
    "model": "Llama-3-8B", "n_gpus": "1", "tp": "1", "pp": "1", "precision_w": "Q4_K_M", "kv_dtype": "fp16", "engine": "llama.cpp",
    "engine_version": "2024-05", "batch_or_concurrency": "1", "isl": "0", "osl": "0", "value": "1", "load_kind": "llama-bench", "note": "",
    "source": "XiongjieDai/GPU-Benchmarks-on-LLM-Inference@aa72e0ec README.md",
}  # fmt: skip


# tokens/s of the source: prompts of 512 and 8192 tokens, 4096 tokens generated
@pytest.mark.parametrize(
    ("gpu", "gpus", "weights", "short", "long", "generated"),
    [
        ("RTX 4090 24GB", 1, "F16", 9382.00, 4744.18, 52.63),
        ("RTX 4090 24GB", 4, "Q4_K_M", 6748.96, 10993.75, 110.52),
        ("H100 PCIe 80GB", 1, "F16", 10815.51, 6191.45, 65.97),
        ("H100 PCIe 80GB", 4, "F16", 11107.40, 17762.96, 61.45),
        ("A40 48GB", 1, "Q4_K_M", 3324.98, 2013.34, 83.10),
    ],
)
def test_facts_are_met(gpu, gpus, weights, short, long, generated):
    row = {**ROW, "gpu": gpu, "n_gpus": str(gpus), "pp": str(gpus), "precision_w": weights}
    prompts = [replay([{**row, "isl": str(n), "metric": "prefill_tok_s"}])[0].predicted for n in (512, 8192)]
    assert prompts == pytest.approx([short, long], rel=0.2)
    token = replay([{**row, "osl": "4096", "metric": "output_tok_s_total"}])[0]
    assert token.predicted == pytest.approx(generated, rel=0.16)
    low, high = ranges("throughput", "own", "llama_cpp")
    assert (token.low, token.high) == (token.predicted * low, token.predicted * high)


def test_a_load_that_is_not_modelled_is_skipped_with_the_reason():
    row = {**ROW, "gpu": "RTX 4090 24GB", "isl": "512", "osl": "128", "metric": "tpot_ms"}
    assert replay([{**row, "load_kind": "bs1_decode"}])[0].predicted > 0
    for change in ({"load_kind": "closed_loop"}, {"batch_or_concurrency": "8"}):
        found = replay([{**row, **change}])[0]
        assert found.predicted is None
        assert "one sequence" in found.skipped

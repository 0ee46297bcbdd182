"""Properties that every estimate keeps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.engines.records import EngineSpec
from planner.errors import UnknownNameError
from planner.estimator.memory.kv_cache import kv_bytes_per_token, sequence_bytes, stages_kv, state_bytes_per_sequence
from planner.estimator.memory.rules import memory_rules, version_key
from planner.estimator.memory.serving import ServingRows, serving_memory
from planner.estimator.memory.weights import stage_sizes, stage_weights_bytes, weights_bytes
from planner.hardware.records import Gpu, Link
from planner.models import load_model
from planner.models.precision import kv_dtype, precision, precisions
from planner.space.shard import Shard
from planner.units import GIB

ENGINES = ("vllm", "sglang", "tensorrt_llm", "tgi", "deepspeed_inference", "transformers")
MODELS = (
    "8b",
    "70b",
    "gemma-3-27b",
    "deepseek-v3",
    "qwen3-next",
    "gpt-oss-20b",
    "nemotron-3-nano",
    "deepseek-v4-flash",
    "falcon-h1-7b",
)
NVLINK = Link("nvswitch", "nvswitch", 450, 2.0, 8)


def gpu(usable_gib=79.19, name="h100"):
    return Gpu(name, "nvidia", "hopper", 80, usable_gib, 3350, {"bf16": 989.0}, 9.0, 5, 700)


def engine(name="vllm", version="0.19.0"):
    return EngineSpec(
        name, version, ("nvidia",), 7.0, "continuous", True, True, True, True, "any", "", (), {}, "", True
    )


def shard(tp=1, pp=1, method="bf16", kv="bf16", card=None, groups=1):
    link = NVLINK if tp > 1 else None
    stage = NVLINK if pp > 1 else None
    return Shard(card or gpu(), precision(method), kv_dtype(kv), tp, pp, link, stage, groups, groups)


def rows(shards=(0,), engines=(0,), seqs=64, tokens=2048, context=4096, each=1280, share=None):
    def many(value):
        return np.broadcast_to(np.asarray(value, dtype=np.int64), (len(shards),)).copy()

    return ServingRows(np.array(shards), np.array(engines), many(seqs), many(tokens), context, each, share)


def memory(model, one=None, run=None, **kwargs):
    return serving_memory(load_model(model), [one or shard()], [run or engine()], rows(**kwargs))


@given(layers=st.integers(1, 200), stages=st.integers(1, 64))
def test_stages_share_the_layers(layers, stages):
    if stages > layers:
        return
    sizes = stage_sizes(layers, stages)
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


@pytest.mark.parametrize("name", MODELS)
def test_one_gpu_holds_every_parameter(name):
    model = load_model(name)
    plain = memory_rules("deepspeed_inference")
    loaded = stage_weights_bytes(model, precision("bf16"), 1, 1, 1, 1, plain)[0]
    assert loaded == pytest.approx(2 * model.params_total, rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["bf16", "fp8", "int4-awq"])
def test_splitting_never_loses_weights(name, method):
    model = load_model(name)
    whole = weights_bytes(model, method)
    for tp, pp in ((2, 1), (8, 1), (1, 2), (1, 4), (2, 2)):
        part = weights_bytes(model, method, tp, pp)
        assert whole / (tp * pp) <= part < whole


@pytest.mark.parametrize("name", MODELS)
def test_fewer_bits_take_fewer_bytes(name):
    model = load_model(name)
    sizes = [weights_bytes(model, m) for m in ("fp32", "bf16", "fp8", "int4-awq")]
    assert sizes == sorted(sizes, reverse=True)


def test_all_precisions_give_bytes():
    for p in precisions():
        assert weights_bytes(load_model("8b"), p) > 1e9


def test_first_and_last_stage_are_fuller():
    first, middle, _, last = stage_weights_bytes(load_model("8b"), precision("bf16"), 1, 4, 1, 1, memory_rules("vllm"))
    assert first == pytest.approx(last, rel=1e-4)
    assert first - middle == pytest.approx(2 * 128256 * 4096, rel=1e-6)


def test_a_tied_head_is_held_on_both_ends():
    model = load_model("llama-3.2-1b")
    first, last = stage_weights_bytes(model, precision("bf16"), 1, 2, 1, 1, memory_rules("vllm"))
    assert first == pytest.approx(last, rel=1e-4)


def test_latent_cache_is_copied_and_attention_groups_undo_that():
    model = load_model("deepseek-v3")
    assert kv_bytes_per_token(model, "bf16", 8) == kv_bytes_per_token(model, "bf16", 1)
    plain = serving_memory(model, [shard(8, 1, "fp8-block", card=gpu(179))], [engine()], rows(tokens=8192, seqs=64))
    spread = serving_memory(
        model, [shard(8, 1, "fp8-block", card=gpu(179), groups=8)], [engine()], rows(tokens=8192, seqs=64)
    )
    assert spread.weights_bytes[0] > plain.weights_bytes[0]
    assert 5 < 8 * spread.kv_pool_tokens[0] / plain.kv_pool_tokens[0] < 8


def test_expert_parallel_keeps_the_bytes_of_the_experts():
    model = load_model("mixtral")
    assert weights_bytes(model, "bf16", 8, 1, 8) == pytest.approx(weights_bytes(model, "bf16", 8), rel=1e-6)


def test_states_are_fixed_and_not_quantised():
    model = load_model("qwen3.5-27b")
    # 48 layers x (48 x 128 x 128 x 4 + 10240 x 3 x 2) bytes; llama.cpp logs 149.6 MiB with a 4-byte convolution
    assert state_bytes_per_sequence(model) == 48 * (48 * 128 * 128 * 4 + 10240 * 3 * 2)
    assert state_bytes_per_sequence(model, 4) == state_bytes_per_sequence(model) / 4
    assert kv_bytes_per_token(model, "bf16") == 16 * 2 * 4 * 256 * 2


def test_hybrids_in_fp8_gain_little_at_short_context():
    """vllm-project/vllm#55196: 1.84 times at 32k, nothing at short context, exactly 2 for attention only."""
    model, rules = load_model("qwen3.5-27b"), memory_rules("vllm", "0.32.0")
    caches = {d: stages_kv(model, kv_dtype(d), 1, 1, 1, rules)[0] for d in ("bf16", "fp8")}

    def gain(tokens):
        return float(sequence_bytes(caches["bf16"], tokens, 2048) / sequence_bytes(caches["fp8"], tokens, 2048))

    assert gain(100) == pytest.approx(1.0, abs=0.05)
    assert 1.7 < gain(32768) < 1.95


def test_sliding_layers_by_engine():
    model = load_model("gemma-3-27b")
    cost = {
        name: float(sequence_bytes(stages_kv(model, kv_dtype("bf16"), 1, 1, 1, memory_rules(name))[0], 65536, 2048))
        for name in ENGINES
    }
    assert cost["transformers"] < cost["vllm"] < cost["sglang"]
    assert cost["sglang"] == 62 * 2 * 16 * 128 * 2 * 65536


@pytest.mark.parametrize("name", MODELS)
@given(tokens=st.integers(1, 200_000), more=st.integers(1, 10_000))
@settings(max_examples=30)
def test_longer_sequences_never_take_less(name, tokens, more):
    for run in ("vllm", "transformers"):
        cost = stages_kv(load_model(name), kv_dtype("bf16"), 2, 1, 1, memory_rules(run))[0]
        assert sequence_bytes(cost, tokens + more, 512) >= sequence_bytes(cost, tokens, 512) >= 0


@pytest.mark.parametrize("run", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_every_engine_estimates_every_model(run, name):
    model = load_model(name)
    shards = [shard(tp, pp, m) for tp in (1, 8) for pp in (1, 2) for m in ("bf16", "int4-awq")]
    found = serving_memory(model, shards, [engine(run, "")], rows(shards=range(len(shards)), engines=[0] * len(shards)))
    for field in (
        "weights_bytes",
        "activation_bytes",
        "runtime_bytes",
        "kv_needed_bytes",
        "required_bytes",
        "capacity_bytes",
    ):
        values = getattr(found, field)
        assert values.shape == (len(shards),)
        assert np.isfinite(values).all()
        assert (values > 0).all()
    assert (found.capacity_bytes <= found.usable_bytes).all()
    assert (found.kv_pool_bytes >= 0).all()
    parts = (
        found.weights_bytes + found.activation_bytes + found.runtime_bytes + found.graphs_bytes + found.kv_needed_bytes
    )
    assert parts == pytest.approx(found.required_bytes)


@given(small=st.floats(20, 90), more=st.floats(0.1, 90))
@settings(max_examples=40)
def test_more_memory_never_hurts(small, more):
    shards = [shard(card=gpu(small)), shard(card=gpu(small + more, "bigger"))]
    found = serving_memory(load_model("8b"), shards, [engine()], rows(shards=(0, 1), engines=(0, 0)))
    assert found.kv_pool_tokens[1] >= found.kv_pool_tokens[0]
    assert found.capacity_bytes[1] > found.capacity_bytes[0]
    assert found.required_bytes[1] == found.required_bytes[0]


@given(seqs=st.integers(1, 512), extra=st.integers(1, 512))
@settings(max_examples=40)
def test_more_sequences_need_more(seqs, extra):
    found = serving_memory(
        load_model("gemma-3-12b"), [shard()], [engine()], rows((0, 0), (0, 0), seqs=[seqs, seqs + extra])
    )
    assert found.kv_needed_bytes[1] >= found.kv_needed_bytes[0]
    assert found.kv_pool_tokens[1] <= found.kv_pool_tokens[0]


def test_rows_are_independent_of_each_other():
    model = load_model("gemma-3-12b")
    shards, runs = [shard(), shard(2), shard(1, 2)], [engine(), engine("sglang", "")]
    pairs = [(s, e) for s in range(3) for e in range(2)]
    many = serving_memory(model, shards, runs, rows([p[0] for p in pairs], [p[1] for p in pairs]))
    for i, (s, e) in enumerate(pairs):
        one = serving_memory(model, shards, runs, rows((s,), (e,)))
        assert one.required_bytes[0] == many.required_bytes[i]
        assert one.kv_pool_tokens[0] == many.kv_pool_tokens[i]


def test_the_share_of_memory_moves_the_pool():
    low, high = memory("8b", share=0.5), memory("8b", share=0.9)
    assert high.kv_pool_bytes[0] - low.kv_pool_bytes[0] == pytest.approx(0.4 * 79.19 * GIB)


def test_at_least_one_long_sequence_must_fit():
    found = memory("8b", seqs=1, each=100, context=131072)
    assert found.kv_needed_bytes[0] == 131072 * 131072


def test_a_model_that_does_not_fit_says_so():
    found = memory("70b")
    assert found.required_bytes[0] > found.capacity_bytes[0]
    assert found.kv_pool_tokens[0] == 0


@pytest.mark.parametrize(
    ("text", "key"), [("0.19.0", (0, 19, 0)), ("~0.11", (0, 11)), ("v0.8.5.dev", (0, 8, 5)), ("", ()), ("main", ())]
)
def test_versions(text, key):
    assert version_key(text) == key


def test_rules_of_versions():
    assert memory_rules("vllm", "0.11.2").until == "0.12"
    assert memory_rules("vllm", "0.19.1").until == "0.21"
    assert memory_rules("vllm", "").until == memory_rules("vllm", "0.32.0").until == "99"
    with pytest.raises(UnknownNameError):
        memory_rules("vlm")

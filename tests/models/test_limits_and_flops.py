"""What limits parallelism, and what a token costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.models import load_model
from planner.models.flops import decode_flops, matmul_flops_per_token, prefill_flops
from planner.models.limits import (
    copied_kv_heads,
    degrees,
    expert_parallel_problem,
    pipeline_parallel_problem,
    precision_parallel_problem,
    tensor_parallel_problem,
)
from planner.models.precision import precision

ISSUES = [
    # model, ranks, words in the reason; from public threads where an engine refused
    ("meta-llama/Llama-3.1-70B-Instruct", 6, "64 attention heads"),
    ("huggyllama/llama-30b", 8, "52 attention heads"),
    ("huggyllama/llama-30b", 3, "52 attention heads"),
    ("gpt2-xl", 2, "25 attention heads"),
    ("Qwen/Qwen2-57B-A14B-Instruct", 8, "28 attention heads"),
    ("google/gemma-3-27b-it", 3, "32 attention heads"),
    ("Qwen/Qwen3-14B", 5, "over 5 ranks"),
]


@pytest.mark.parametrize(("name", "ranks", "words"), ISSUES)
def test_engines_refused_these(name, ranks, words):
    assert words in tensor_parallel_problem(load_model(name), ranks)


@pytest.mark.parametrize(
    ("name", "expected"), [("70b", [1, 2, 4, 8, 16]), ("phi-4", [1, 2]), ("qwen2.5-7b", [1, 2, 4])]
)
def test_degrees(name, expected):
    assert degrees(load_model(name), 16) == expected


def test_the_vocabulary_counts_as_stored():
    assert tensor_parallel_problem(load_model("granite-3.1-2b"), 4) is None  # 49155 is stored as 49216


def test_copies_are_named():
    assert copied_kv_heads(load_model("70b"), 8) is None
    assert "2 times" in copied_kv_heads(load_model("70b"), 16)
    assert "latent" in copied_kv_heads(load_model("deepseek-v3"), 8)


def test_stages_and_experts():
    assert pipeline_parallel_problem(load_model("8b"), 32) is None
    assert "32 layers" in pipeline_parallel_problem(load_model("8b"), 33)
    assert expert_parallel_problem(load_model("8b"), 2) == "the model has no experts"
    assert expert_parallel_problem(load_model("mixtral"), 8) is None
    assert "8 experts" in expert_parallel_problem(load_model("mixtral"), 3)
    assert pipeline_parallel_problem(load_model("8b"), 0)
    assert tensor_parallel_problem(load_model("8b"), 0)


def test_dense_matmul_is_twice_the_parameters():
    model = load_model("8b")
    weights = (
        model.params_total
        - model.embedding_params
        - model.final_norm_params
        - sum(layer.norm_params for layer in model.layers)
    )
    assert matmul_flops_per_token(model) == 2 * weights


def test_attention_grows_with_the_context():
    model = load_model("8b")
    assert decode_flops(model, 1000).attention == 4 * 32 * 128 * 32 * 1000
    assert decode_flops(model, 0).attention == 0


def test_windows_stop_growing():
    model = load_model("mistral-7b-v0.1")
    assert decode_flops(model, 8192).attention == decode_flops(model, 4096).attention
    assert decode_flops(model, 2048).attention == decode_flops(model, 4096).attention / 2


def test_sparse_attention_costs_less_than_full_at_long_context():
    sparse, full = load_model("deepseek-v3.2"), load_model("deepseek-v3")
    assert decode_flops(sparse, 100_000).attention < decode_flops(full, 100_000).attention / 3


@pytest.mark.parametrize("name", ["8b", "gemma-3-12b", "deepseek-v3", "deepseek-v4-flash", "qwen3-next", "gpt-oss-20b"])
@given(tokens=st.integers(1, 20_000))
def test_reading_costs_more_than_the_last_token(name, tokens):
    model = load_model(name)
    whole, last = prefill_flops(model, tokens), decode_flops(model, tokens)
    assert whole.total >= matmul_flops_per_token(model, head=False) * tokens
    assert last.total >= matmul_flops_per_token(model)
    assert prefill_flops(model, tokens + 1).total > whole.total


def test_arrays_work_like_numbers():
    np = pytest.importorskip("numpy")
    model, lengths = load_model("gemma-3-12b"), [1, 100, 1024, 5000]
    many = prefill_flops(model, np.array(lengths, dtype=float))
    assert many.total.tolist() == pytest.approx([prefill_flops(model, n).total for n in lengths])


@pytest.mark.parametrize(
    ("name", "method", "tp", "ep", "allowed"),
    [
        ("qwen3-235b", "fp8-block", 8, 1, False),  # 1536 / 8 = 192 is no multiple of 128
        ("qwen3-235b", "fp8-block", 8, 8, True),
        ("qwen3-235b", "fp8-block", 4, 1, True),
        ("qwen2.5-72b", "int4-awq", 2, 1, False),  # 29568 / 2 = 115.5 x 128
        ("70b", "int4-awq", 8, 1, True),
        ("70b", "fp8", 8, 1, True),
        ("gpt-oss-120b", "mxfp4", 8, 1, True),
        ("qwen2.5-72b", "int4-awq", 1, 1, True),
    ],
)
def test_scale_blocks_are_not_cut(name, method, tp, ep, allowed):
    problem = precision_parallel_problem(load_model(name), precision(method), tp, ep)
    assert (problem is None) == allowed

"""Against measured start-up logs."""

import pytest

from planner.estimator.memory.activations import activation_bytes, activation_cost
from planner.estimator.memory.kv_cache import kv_bytes_per_token, pool_tokens, stages_kv
from planner.estimator.memory.rules import memory_rules
from planner.estimator.memory.runtime import runtime_bytes
from planner.estimator.memory.weights import stage_weights_bytes, weights_bytes
from planner.models import load_model
from planner.models.precision import kv_dtype, precision
from planner.units import GIB
from tests.memory.facts import CONTEXT, LOGS, MXFP4, TOKEN_BYTES

RULES = memory_rules("vllm", "0.19.0")


@pytest.mark.parametrize(("name", "method", "tp", "pp", "weights", "activation", "pool", "tokens"), LOGS)
def test_start_up_logs(name, method, tp, pp, weights, activation, pool, tokens):
    model = load_model(name, offline=True)
    loaded = stage_weights_bytes(model, precision(method), tp, pp, 1, 1, RULES)
    assert loaded[0] / GIB == pytest.approx(weights, rel=0.01)
    peaks = [
        float(activation_bytes(activation_cost(model, method, tp, 1, i == pp - 1, RULES), 1024, 8192))
        for i in range(pp)
    ]
    assert peaks[0] / GIB == pytest.approx(activation, rel=0.08)
    left = [0.95 * 79.19 * GIB - w - a - runtime_bytes(RULES, tp, pp, True) for w, a in zip(loaded, peaks, strict=True)]
    assert left[0] / GIB == pytest.approx(pool, rel=0.015)
    caches = stages_kv(model, kv_dtype("fp32" if method == "fp32" else "bf16"), tp, pp, 1, RULES)
    context = CONTEXT.get(name, 8192)
    held = min(pool_tokens(kv, room, RULES.kv, context, 8192) for kv, room in zip(caches, left, strict=True))
    assert held == pytest.approx(tokens, rel=0.02)


@pytest.mark.parametrize(("name", "tp", "expected"), TOKEN_BYTES)
def test_cache_bytes_per_token(name, tp, expected):
    assert kv_bytes_per_token(load_model(name), "bf16", tp, version="0.19.0") == pytest.approx(expected, rel=1e-9)


def test_fp8_halves_the_cache():
    model = load_model("8b")
    assert kv_bytes_per_token(model, "fp8") == kv_bytes_per_token(model, "bf16") / 2


@pytest.mark.parametrize(("name", "version", "tp", "expected"), MXFP4)
def test_mxfp4_is_padded_as_the_engine_does(name, version, tp, expected):
    assert weights_bytes(load_model(name), "mxfp4", tp, version=version) / GIB == pytest.approx(expected, rel=0.01)


def test_older_engines_keep_more_for_the_sampler():
    model = load_model("Qwen/Qwen3-14B")
    peak = {
        v: float(activation_bytes(activation_cost(model, "bf16", 1, 1, True, memory_rules("vllm", v)), 1024, 8192))
        / GIB
        for v in ("0.15.0", "0.17.0")
    }
    assert peak["0.15.0"] == pytest.approx(5.64, rel=0.02)  # run reports in llm-d-incubation/llm-d-planner#205
    assert peak["0.17.0"] == pytest.approx(2.23, rel=0.02)

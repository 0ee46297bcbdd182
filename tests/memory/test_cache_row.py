"""The cache row of `planner memory` names what it counts: mean requests, or one as long as the engine accepts."""

from __future__ import annotations

import pytest

from planner import memory
from planner.request import HardwareFilter, Pins, ServeRequest

BYTES_PER_TOKEN = 32 * 2 * 8 * 128 * 2  # layers x (key, value) x heads x width x bytes of bf16, Llama 3.1 8B


def report(sequences, longest=None):
    pins = Pins(engine="vllm", max_num_seqs=sequences, max_model_len=longest)
    return memory(ServeRequest(model="llama-3.1-8b", hardware=HardwareFilter(owned="1xh100-sxm"), pins=pins))


@pytest.mark.parametrize(
    ("sequences", "longest", "label", "tokens"),
    [
        (1, None, "KV cache of one request of 4096 tokens, the longest", 4096),
        (2, 8192, "KV cache of one request of 8192 tokens, the longest", 8192),
        (64, None, "KV cache of 64 requests of 1280 tokens", 64 * 1280),
        (64, 131072, "KV cache of one request of 131072 tokens, the longest", 131072),
    ],
)
def test_label_and_amount_agree(sequences, longest, label, tokens):
    found = report(sequences, longest)
    gib = dict(found.parts)[label]
    assert gib == pytest.approx(tokens * BYTES_PER_TOKEN / 2**30, rel=0.01)
    assert found.kv_bytes_per_token == pytest.approx(BYTES_PER_TOKEN, rel=0.01)

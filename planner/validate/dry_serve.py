"""Memory of one tensor-parallel rank that serves, counted on the transformers model of that rank's shapes.

The rank's model has heads, feed-forward and vocabulary divided by the tensor-parallel degree: what transformers' and the
engines' plans cut. Collectives, and buffers an engine keeps beside its model, are not in it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from planner.validate.dry_model import build, build_config, plain_masks, torch_modules

LAYERS = 2


@dataclass(frozen=True)
class Served:
    """Bytes of one rank: weights by group, of one cached token (all layers, 16 bit), alive at most in a prefill."""

    layer_weights: float
    other_weights: float
    cached_token: float
    prefill: float

    @property
    def weights(self) -> float:
        """All weights in 16 bit."""
        return self.layer_weights + self.other_weights


def count_serving(raw: dict[str, Any], layers: int, *, ranks: int, tokens: int, sequences: int) -> Served:
    """Counted bytes of a rank of `layers` layers; prefill: one forward of `tokens` tokens, logits of `sequences`."""
    torch, _ = torch_modules()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            model = build(build_config(raw, layers, ranks), torch.bfloat16)
        inside = sum(p.numel() * p.element_size() for p in model.model.layers.parameters())
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        low, cached = _prefill(raw, LAYERS, ranks, tokens, sequences)
    return Served(float(inside), float(whole - inside), cached * layers / LAYERS, low)


def _prefill(raw: dict[str, Any], layers: int, ranks: int, tokens: int, sequences: int) -> tuple[float, float]:
    """(bytes alive at most beside weights and cache, bytes cached per token) of a forward without gradients."""
    torch, transformers = torch_modules()
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = build(build_config(raw, layers, ranks), torch.bfloat16).eval()
        cache = transformers.DynamicCache()
        ids = torch.zeros((1, tokens), dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(model)
        with plain_masks(model), tracker:
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=min(sequences, tokens))
        held = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    total = max(float(part["Total"]) for part in tracker.get_tracker_snapshot("peak").values())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return total - weights - held, held / tokens

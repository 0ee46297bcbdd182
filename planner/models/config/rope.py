"""Size of the rotary tables an engine precomputes: positions x rotary width, one table for each distinct rule."""

from __future__ import annotations

from planner.models.config.fields import Fields
from planner.models.spec import Attention, LatentAttention, Layer

_NO_ROPE = (
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "bloom",
    "mpt",
    "opt",
    "t5",
    "whisper",
    "bart",
    "jamba",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "nemotron_h",
)


def rope_elements(f: Fields, context: int, layers: tuple[Layer, ...]) -> int:
    """Elements of all rotary tables of a model.

    Positions follow vLLM's get_rope (model_executor/layers/rotary_embedding): linear and dynamic scaling multiply the
    context by the factor, YaRN covers original x factor, long rope holds both ranges, the rest the context.
    """
    if f.text("model_type") in _NO_ROPE or not f.has("num_attention_heads", "n_head", "n_heads"):
        return 0
    mixers = {m for layer in set(layers) for m in layer.mixers if isinstance(m, Attention | LatentAttention)}
    if not mixers:
        return 0
    share = _share(f)
    full = [m for m in mixers if isinstance(m, LatentAttention) or m.kind != "sliding"] or list(mixers)
    sliding = [m for m in mixers if isinstance(m, Attention) and m.kind == "sliding"]
    total = _positions(f, context) * _width(full[0], share)
    if sliding and _own_sliding_rule(f):
        total += context * _width(sliding[0], share)
    return total


def _width(mixer: Attention | LatentAttention, share: float) -> int:
    return mixer.qk_rope_head_dim if isinstance(mixer, LatentAttention) else int(mixer.head_dim * share)


def _share(f: Fields) -> float:
    value = f.get("partial_rotary_factor", "rotary_pct")
    rope = f.level("rope_parameters")
    if value is None and rope is not None:
        value = rope.get("partial_rotary_factor")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1 else 1.0


def _own_sliding_rule(f: Fields) -> bool:
    rope = f.raw.get("rope_parameters")
    two = isinstance(rope, dict) and "sliding_attention" in rope
    return two or f.has("rope_local_base_freq", "swa_rope_theta") or f.text("model_type").startswith("gemma3")


def _positions(f: Fields, context: int) -> int:
    scaling = f.get("rope_scaling", "rope_parameters")
    if isinstance(scaling, dict) and isinstance(scaling.get("full_attention"), dict):
        scaling = scaling["full_attention"]
    if not isinstance(scaling, dict):
        return context
    rule = Fields(scaling, "rope_scaling.")
    kind, factor = rule.text("rope_type", "type"), rule.number("factor", default=1.0)
    if kind in ("linear", "dynamic"):
        return int(context * factor)
    original = rule.optional("original_max_position_embeddings", high=10**9) or f.optional(
        "original_max_position_embeddings", high=10**9
    )
    if kind in ("yarn", "deepseek_yarn") and original:
        return int(original * factor)
    return context + original if kind in ("longrope", "su") and original else context

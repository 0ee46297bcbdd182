"""What stands beside the language decoder: vision and audio towers with their projectors, MTP heads.

Shapes from transformers' and vLLM's modules of each tower; a tower of an unknown kind is counted as a plain ViT and
the reader says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import ModelConfigError
from planner.models.config.fields import Fields, whole
from planner.models.spec import Layer, Tower


@dataclass(frozen=True)
class _Vit:
    """Style of a vision transformer: biases, norms with bias (2) or without (1), gating, embeddings, outer norms."""

    bias: bool = True
    norm: int = 2
    gated: bool = False
    mlp_bias: bool = True
    class_token: bool = False
    positions: str = "patches"
    patch_bias: bool = True
    outer_norms: int = 1
    extra: str = ""


_VITS = {
    "siglip_vision_model": _Vit(),
    "siglip2_vision_model": _Vit(),
    "clip_vision_model": _Vit(class_token=True, patch_bias=False, outer_norms=2),
    "pixtral": _Vit(False, 1, True, False, False, "none", False, 1),
    "llama4_vision_model": _Vit(class_token=True, patch_bias=False, outer_norms=2),
    "moonvit": _Vit(positions="grid"),
    "kimi_k25": _Vit(positions="grid"),
    "qwen3_vl": _Vit(positions="table", outer_norms=0),
    "qwen3_vl_moe": _Vit(positions="table", outer_norms=0),
    "qwen3_5": _Vit(positions="table", outer_norms=0),
    "qwen3_5_moe": _Vit(positions="table", outer_norms=0),
    "qwen2_vl": _Vit(positions="none", patch_bias=False, outer_norms=0),
    "qwen2_5_vl": _Vit(True, 1, True, True, False, "none", False, 0),
    "gemma4_vision": _Vit(False, 1, True, False, False, "two", False, 0, "gemma4"),
}
_KINDS_ALIASES = {
    "llama4": "llama4_vision_model",
    "mistral3": "pixtral",
    "gemma3": "siglip_vision_model",
    "kimi_vl": "moonvit",
    "paligemma": "siglip_vision_model",
}


def _vit_params(v: Fields, style: _Vit) -> tuple[int, int]:
    """(parameters of the tower without projector, its width)."""
    width = v.count(
        "embed_dim" if _is_qwen2(v) else "hidden_size",
        "vt_hidden_size",
        "embed_dim",
        "width",
    )
    layers = v.count("num_hidden_layers", "depth", "vt_num_hidden_layers", "layers", high=1000)
    inner = v.optional("intermediate_size", "vt_intermediate_size") or int(v.number("mlp_ratio", default=4.0) * width)
    patch, channels = _side(v, "patch_size", 14), v.count("num_channels", "in_channels", default=3)
    heads = v.count("num_attention_heads", "num_heads", "vt_num_attention_heads", default=1)
    attn_width = heads * v.count("head_dim", default=max(1, width // heads)) if v.has("head_dim") else width
    attn = 4 * width * attn_width + (3 * attn_width + width) * style.bias
    mlp = width * inner * (3 if style.gated else 2) + ((2 if style.gated else 1) * inner + width) * style.mlp_bias
    block = attn + mlp + 2 * style.norm * width
    if style.extra == "gemma4":
        block += 2 * width + 2 * attn_width // heads
    total = (
        layers * block
        + patch * patch * channels * v.count("temporal_patch_size", default=1) * width
        + width * style.patch_bias
    )
    total += _pooling_head(v, width, inner)
    total += style.outer_norms * style.norm * width + width * style.class_token + _positions(v, style, patch) * width
    return total, width


def _is_qwen2(v: Fields) -> bool:
    """Qwen2-VL's tower: embed_dim is its width, hidden_size that of the decoder."""
    return v.text("model_type").startswith("qwen2_vl") and v.has("embed_dim")


def _side(v: Fields, name: str, default: int) -> int:
    """A side in pixels, also where the config holds [height, width]."""
    value = v.get(name)
    return whole(value[0], name) if isinstance(value, list) and value else v.count(name, default=default)


def _pooling_head(v: Fields, width: int, inner: int) -> int:
    """SigLIP's attention pooling, only where the config asks for it."""
    if not v.flag("vision_use_head"):
        return 0
    return 4 * width * width + 4 * width + 2 * width + 2 * width * inner + inner + width + width


def _positions(v: Fields, style: _Vit, patch: int) -> int:
    if style.positions == "patches":
        side = _side(v, "image_size", 336) // patch
        return side * side + style.class_token
    if style.positions == "grid":
        return v.count("init_pos_emb_height", default=64) * v.count("init_pos_emb_width", default=64)
    if style.positions == "table":
        return v.count("num_position_embeddings", default=0, low=0)
    return 2 * v.count("position_embedding_size", default=0, low=0) if style.positions == "two" else 0


def _projector_params(top: Fields, v: Fields, width: int, hidden: int) -> int:
    """Projector between tower and decoder, by the family of the whole model."""
    family = top.text("model_type")
    if family in ("gemma3", "paligemma"):
        return width * hidden + (width if family == "gemma3" else hidden)
    if family in ("gemma4",):
        return width * hidden
    if family.startswith(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_6")):
        return _qwen_merger(v, width, hidden)
    if family == "llama4":
        out, inner = v.count("projector_output_dim", default=4096), v.count("projector_input_dim", default=4096)
        shuffled = v.count("intermediate_size", default=4 * width)
        return shuffled * inner + out * out + v.count("vision_output_dim", default=out) * hidden
    if family in ("kimi_vl", "kimi_k25"):
        merged = width * 4
        return merged * merged + merged + merged * hidden + hidden + 2 * width
    if family == "mistral3":
        merge = top.count("spatial_merge_size", default=2)
        return width + width * width * merge * merge + width * hidden + hidden * hidden
    features = top.get("vision_feature_layer")
    count = len(features) if isinstance(features, list) else 1
    return (
        width * count * hidden
        + hidden
        + hidden * hidden
        + hidden
        + (hidden if family in ("llava_next", "llava_onevision") else 0)
    )


def _qwen_merger(v: Fields, width: int, hidden: int) -> int:
    merged = width * v.count("spatial_merge_size", default=2) ** 2
    out = v.optional("out_hidden_size") or (v.count("hidden_size") if _is_qwen2(v) else hidden)
    one = merged * merged + merged + merged * out + out
    norm = width if v.text("model_type").startswith("qwen2_5_vl") else 2 * width
    deep = len(v.items("deepstack_visual_indexes") or [])
    return one + norm + deep * (one + 2 * merged)


def vision_tower(top: Fields, hidden: int) -> tuple[Tower | None, list[str]]:
    """(vision tower with its projector or None, assumptions)."""
    v = top.level("vision_config") or (
        Fields(top.raw["thinker_config"]).level("vision_config")
        if isinstance(top.raw.get("thinker_config"), dict)
        else None
    )
    if v is None or not v.raw:
        return None, []
    kind = v.text("model_type") or _KINDS_ALIASES.get(top.text("model_type"), top.text("model_type"))
    style, notes = _VITS.get(kind) or _VITS.get(kind.removesuffix("_vision")), []
    if style is None:
        style = _Vit()
        notes.append(
            f"vision tower {kind or 'without a type'!r} is not known here: counted as a plain ViT of its stated size"
        )
    try:
        params, width = _vit_params(v, style)
    except ModelConfigError as error:
        return None, [f"vision tower cannot be counted ({error.what}): left out, so weights are too low by its size"]
    return Tower("vision", params + _projector_params(top, v, width, hidden)), notes


def audio_tower(top: Fields, hidden: int) -> tuple[Tower | None, list[str]]:
    """(audio tower as plain transformer blocks or None, assumptions)."""
    a = top.level("audio_config")
    if a is None or not a.raw:
        return None, []
    width = a.optional("d_model", "hidden_size")
    layers = a.optional("encoder_layers", "num_hidden_layers", "num_layers", high=1000)
    if width is None or layers is None:
        return None, ["audio tower states no size: left out, so weights are too low by its size"]
    inner = a.optional("encoder_ffn_dim", "intermediate_size") or 4 * width
    return Tower("audio", layers * (4 * width * width + 2 * width * inner) + width * hidden), [
        "audio tower counted as plain transformer blocks"
    ]


def mtp_tower(text: Fields, layers: tuple[Layer, ...], hidden: int) -> Tower | None:
    """Heads that predict further tokens: a block and a 2 x hidden projection each; not loaded for plain serving."""
    heads = text.count("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", default=0, low=0)
    if not heads:
        return None
    attention = next(
        (layer for layer in reversed(layers) if layer.mixers and not hasattr(layer.mixers[0], "params_count")),
        layers[-1],
    )
    block = attention.params(hidden)
    if attention.mlp is None and layers[-1].mlp is not None:
        block += layers[-1].params(hidden)
    return Tower("mtp", heads * (block + 2 * hidden * hidden + 3 * hidden), loaded=False)


def towers_of(top: Fields, text: Fields, layers: tuple[Layer, ...], hidden: int) -> tuple[tuple[Tower, ...], list[str]]:
    """All towers that the config states, with what had to be assumed."""
    vision, notes = vision_tower(top, hidden)
    audio, more = audio_tower(top, hidden)
    mtp = mtp_tower(text, layers, hidden)
    return tuple(t for t in (vision, audio, mtp) if t is not None), notes + more

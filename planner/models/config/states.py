"""Mixers with a fixed state (Mamba, gated delta rule, short convolution), counted from transformers' modules."""

from __future__ import annotations

from planner.errors import ModelConfigError
from planner.models.config.fields import Fields
from planner.models.spec import StateMixer


def mamba_mixer(f: Fields) -> StateMixer:
    """Mamba-1 or Mamba-2, told apart by the presence of heads."""
    if f.has("mamba_num_heads", "mamba_n_heads") or (f.text("model_type") == "mamba2"):
        return _mamba2(f)
    return _mamba1(f)


def _mamba1(f: Fields) -> StateMixer:
    hidden = f.count("hidden_size", "d_model")
    inner = f.optional("intermediate_size") if f.text("model_type") in ("mamba", "falcon_mamba") else None
    inner = inner or f.count("mamba_expand", "expand", default=2) * hidden
    state, kernel = (
        f.count("mamba_d_state", "state_size", default=16),
        f.count("mamba_d_conv", "conv_kernel", default=4),
    )
    rank_given = f.get("mamba_dt_rank", "time_step_rank")
    rank = -(-hidden // 16) if rank_given in (None, "auto") else f.count("mamba_dt_rank", "time_step_rank")
    conv_bias = f.flag("mamba_conv_bias", "use_conv_bias", default=True)
    params = hidden * 2 * inner + inner * kernel + inner * conv_bias + inner * (rank + 2 * state) + rank * inner + inner
    params += inner * state + inner + inner * hidden + (2 * inner + hidden) * f.flag("mamba_proj_bias", "use_bias")
    if f.text("model_type") == "jamba":
        params += rank + 2 * state
    return StateMixer("mamba", params, inner * state, inner * (kernel - 1), flops_per_token=9.0 * inner * state)


def _mamba2(f: Fields) -> StateMixer:
    hidden, heads = f.count("hidden_size", "d_model"), f.count("mamba_num_heads", "mamba_n_heads", "num_heads")
    inner = f.optional("mamba_d_ssm") or heads * _head_width(f, hidden, heads)
    state = f.count("ssm_state_size", "mamba_d_state", "state_size", default=128)
    groups, kernel = f.count("n_groups", "mamba_n_groups", default=1), f.count("conv_kernel", "mamba_d_conv", default=4)
    conv = inner + 2 * groups * state
    norm = inner if f.flag("mamba_rms_norm", default=True) else 0
    params = (
        hidden * (inner + conv + heads)
        + conv * kernel
        + conv * f.flag("use_conv_bias", "mamba_conv_bias", default=True)
    )
    params += (
        3 * heads + norm + inner * hidden + (inner + conv + heads + hidden) * f.flag("mamba_proj_bias", "use_bias")
    )
    width = 4.0 if f.text("mamba_ssm_cache_dtype", "mamba_ssm_dtype") == "float32" else 2.0
    return StateMixer(
        "mamba2", params, inner * state, conv * (kernel - 1), width, flops_per_token=6.0 * inner * state, heads=heads
    )


def _head_width(f: Fields, hidden: int, heads: int) -> int:
    given = f.get(
        "mamba_head_dim", "mamba_d_head", "head_dim" if f.text("model_type") == "mamba2" else "mamba_head_dim"
    )
    if given in (None, "auto"):
        return f.count("mamba_expand", "expand", default=2) * hidden // heads
    return f.count("mamba_head_dim", "mamba_d_head", "head_dim")


def delta_mixer(f: Fields) -> StateMixer:
    """Gated delta rule of Qwen3-Next and 3.5: q, k, v, z, beta and decay projections, short convolution, gated norm."""
    hidden = f.count("hidden_size")
    kh, vh = f.count("linear_num_key_heads"), f.count("linear_num_value_heads")
    kd, vd, kernel = (
        f.count("linear_key_head_dim"),
        f.count("linear_value_head_dim"),
        f.count("linear_conv_kernel_dim", default=4),
    )
    key, value = kh * kd, vh * vd
    conv = 2 * key + value
    params = hidden * (2 * key + 2 * value) + hidden * 2 * vh + conv * kernel + 2 * vh + vd + value * hidden
    width = 2.0 if f.text("mamba_ssm_dtype") == "bfloat16" else 4.0
    return StateMixer(
        "gated_delta", params, vh * kd * vd, conv * (kernel - 1), width, flops_per_token=8.0 * vh * kd * vd, heads=vh
    )


def kda_mixer(f: Fields) -> StateMixer:
    """Kimi delta attention: q, k, v with short convolutions, low-rank decay and gate, head norm."""
    hidden, inner = f.count("hidden_size"), f.level("linear_attn_config")
    if inner is None:
        raise ModelConfigError("config has no field 'linear_attn_config'", "", "Check the file.")
    heads, dim, kernel = (
        inner.count("num_heads"),
        inner.count("head_dim"),
        inner.count("short_conv_kernel_size", default=4),
    )
    width = heads * dim
    gate = hidden * width if inner.flag("use_full_rank_gate") else hidden * dim + dim * width
    params = (
        3 * hidden * width
        + 3 * width * kernel
        + hidden * dim
        + dim * width
        + hidden * heads
        + gate
        + heads
        + width
        + dim
        + width * hidden
    )
    return StateMixer(
        "kda",
        params,
        heads * dim * dim,
        3 * width * (kernel - 1),
        4.0,
        flops_per_token=8.0 * heads * dim * dim,
        heads=heads,
    )


def conv_mixer(f: Fields) -> StateMixer:
    """Short convolution of LFM2: in projection to three widths, depthwise convolution, out projection."""
    hidden, kernel, bias = f.count("hidden_size"), f.count("conv_L_cache", default=3), f.flag("conv_bias")
    params = 4 * hidden * hidden + hidden * kernel + 5 * hidden * bias
    return StateMixer("short_conv", params, 0, hidden * kernel)


def lightning_mixer(f: Fields) -> StateMixer:
    """Lightning attention of MiniMax-01: q, k, v, output gate, out projection and a norm; each head keeps a
    head_dim x head_dim state."""
    hidden, heads = f.count("hidden_size"), f.count("num_attention_heads")
    dim = f.count("head_dim", default=max(1, hidden // heads))
    width = heads * dim
    params = hidden * 3 * width + 2 * hidden * width + width
    return StateMixer(
        "lightning", params, heads * dim * dim, 0, 4.0, flops_per_token=4.0 * heads * dim * dim, heads=heads
    )


def rglru_mixer(f: Fields) -> StateMixer:
    """Recurrent block of RecurrentGemma: two input projections, convolution, block-diagonal gates, out projection."""
    hidden, heads = f.count("hidden_size"), f.count("num_attention_heads")
    width, kernel = f.count("lru_width", default=hidden), f.count("conv1d_width", default=4)
    gates = 2 * (width * width // heads + width) + width
    params = 2 * (hidden * width + width) + width * kernel + width + gates + width * hidden + hidden
    return StateMixer("rglru", params, width, width * (kernel - 1), 4.0, flops_per_token=10.0 * width)

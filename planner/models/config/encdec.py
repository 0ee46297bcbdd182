"""Encoder-decoders (T5, BART, Whisper and kin): decoder layers with cross attention, the encoder as a tower."""

from __future__ import annotations

from dataclasses import dataclass

from planner.models.config.fields import Fields
from planner.models.spec import Attention, DenseMlp, Layer, Tower

T5 = ("t5", "mt5", "umt5", "longt5", "switch_transformers")
BART = ("bart", "mbart", "pegasus", "marian", "blenderbot", "blenderbot-small", "m2m_100", "nllb", "plbart")


@dataclass(frozen=True)
class EncoderDecoder:
    """What the reader needs: decoder layers, encoder tower, extra embedding parameters, encoder length in tokens."""

    layers: tuple[Layer, ...]
    encoder: Tower
    embedding_extra: int
    final_norm: int
    encoder_tokens: int
    tied: bool
    context: int


def is_encoder_decoder(family: str) -> bool:
    """True for the families read here."""
    return family in T5 or family in BART or family == "whisper"


def read_encoder_decoder(f: Fields) -> EncoderDecoder:
    """Counts from transformers' module shapes of the three styles."""
    family = f.text("model_type")
    if family in T5:
        return _t5(f)
    return _whisper(f) if family == "whisper" else _bart(f)


def _t5(f: Fields) -> EncoderDecoder:
    hidden, heads, width = f.count("d_model"), f.count("num_heads"), f.count("d_kv", default=64)
    encoder_layers = f.count("num_layers", high=1000)
    decoder_layers = f.count("num_decoder_layers", default=encoder_layers, high=1000)
    gated = f.flag("is_gated_act") or f.text("feed_forward_proj", default="relu").startswith("gated")
    mlp, attn = DenseMlp(f.count("d_ff"), gated), Attention(heads, heads, width)
    cross = Attention(heads, heads, width, cross=True)
    buckets = f.count("relative_attention_num_buckets", default=32) * heads
    each = f.text("model_type") == "umt5"
    block = attn.params(hidden) + mlp.params(hidden) + 2 * hidden + (buckets if each else 0)
    layer = Layer((attn, cross), mlp, 3 * hidden + (buckets if each else 0))
    encoder = encoder_layers * block + hidden + (0 if each else buckets)
    length = f.count("n_positions", default=512)
    extra = 0 if each else buckets
    return EncoderDecoder(
        (layer,) * decoder_layers,
        Tower("encoder", encoder),
        extra,
        hidden,
        length,
        f.flag("tie_word_embeddings", default=True),
        length,
    )


def _bart(f: Fields) -> EncoderDecoder:
    hidden, family = f.count("d_model"), f.text("model_type")
    positions = f.count("max_position_embeddings", default=1024)
    rows = 0 if family in ("m2m_100", "nllb") else positions + (2 if family in ("bart", "mbart", "plbart") else 0)
    norm = 2 * hidden
    inner = norm if family in ("bart", "mbart", "plbart") else 0
    last = norm if family in ("mbart", "pegasus", "m2m_100", "nllb", "blenderbot") else 0
    enc_mlp = DenseMlp(f.count("encoder_ffn_dim"), False, True)
    dec_mlp = DenseMlp(f.count("decoder_ffn_dim"), False, True)
    enc_heads, dec_heads = f.count("encoder_attention_heads"), f.count("decoder_attention_heads")
    enc = Attention(enc_heads, enc_heads, max(1, hidden // enc_heads), q_bias=True, kv_bias=True, o_bias=True)
    own = Attention(dec_heads, dec_heads, max(1, hidden // dec_heads), q_bias=True, kv_bias=True, o_bias=True)
    cross = Attention(
        dec_heads, dec_heads, max(1, hidden // dec_heads), q_bias=True, kv_bias=True, o_bias=True, cross=True
    )
    encoder = (
        f.count("encoder_layers", high=1000) * (enc.params(hidden) + enc_mlp.params(hidden) + 2 * norm)
        + rows * hidden
        + inner
        + last
    )
    layer = Layer((own, cross), dec_mlp, 3 * norm)
    return EncoderDecoder(
        (layer,) * f.count("decoder_layers", high=1000),
        Tower("encoder", encoder),
        rows * hidden + inner,
        last,
        positions,
        True,
        positions,
    )


def _whisper(f: Fields) -> EncoderDecoder:
    """Key projections have no bias; the encoder starts with two convolutions over mel bands."""
    hidden = f.count("d_model")
    source, target = f.count("max_source_positions", default=1500), f.count("max_target_positions", default=448)
    enc_heads, dec_heads = f.count("encoder_attention_heads"), f.count("decoder_attention_heads")
    enc = Attention(enc_heads, enc_heads, max(1, hidden // enc_heads), q_bias=True, o_bias=True)
    own = Attention(dec_heads, dec_heads, max(1, hidden // dec_heads), q_bias=True, o_bias=True)
    cross = Attention(dec_heads, dec_heads, max(1, hidden // dec_heads), q_bias=True, o_bias=True, cross=True)
    enc_mlp = DenseMlp(f.count("encoder_ffn_dim"), False, True)
    block = enc.params(hidden) + hidden + enc_mlp.params(hidden) + 4 * hidden
    convolutions = f.count("num_mel_bins", default=80) * hidden * 3 + hidden + hidden * hidden * 3 + hidden
    encoder = f.count("encoder_layers", high=1000) * block + convolutions + source * hidden + 2 * hidden
    layer = Layer((own, cross), DenseMlp(f.count("decoder_ffn_dim"), False, True), 6 * hidden + 2 * hidden)
    layers = (layer,) * f.count("decoder_layers", high=1000)
    return EncoderDecoder(layers, Tower("encoder", encoder), target * hidden, 2 * hidden, source, True, target)

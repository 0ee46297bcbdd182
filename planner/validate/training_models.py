"""Models of published training measurements: known ones, and those that only a row or training_rows.yaml gives the dimensions of."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from planner.errors import PlannerError
from planner.estimator.time.surfaces import read_data
from planner.models.load import load_model
from planner.models.spec import Attention, DenseMlp, Layer, ModelSpec, MoeMlp


class SkipRowError(Exception):
    """A row that cannot be predicted, with the reason."""


@cache
def tables() -> dict[str, Any]:
    """training_rows.yaml, loaded safely."""
    found: dict[str, Any] = read_data("planner.validate", "training_rows.yaml")
    return found


def number(text: str, default: float | None = None) -> float:
    """The first number of a cell, or `default`. SkipRowError where neither is."""
    match = re.search(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", text or "")
    if match:
        return float(match[0])
    if default is None:
        raise SkipRowError("a number that the estimate needs is not stated")
    return default


def dense_model(row: dict[str, str]) -> ModelSpec:
    """A model of equal layers from the dimensions of the row; two or three matrices as its parameter count says, or as the known model
    has of which it is the first so many layers ("NAME-7L")."""
    cut = re.fullmatch(r"(.+)-(\d+)L", row["model"])
    if cut and not row["params_b"]:
        whole = load_model(tables()["models"].get(cut[1], cut[1]), offline=True)
        return replace(whole, name=row["model"], layers=whole.layers[: int(cut[2])])
    layers, hidden, heads, vocab = (int(number(row[c])) for c in ("layers", "hidden", "heads", "vocab"))
    kv, width = int(number(row["kv_heads"], heads)), int(number(row["ffn"]))
    return _dense(row["model"], (layers, hidden, heads, kv, width, vocab), number(row["params_b"]) * 1e9)


@lru_cache(maxsize=1024)
def _dense(name: str, dims: tuple[int, ...], stated: float) -> ModelSpec:
    layers, hidden, heads, kv, width, vocab = dims

    def build(gated: bool, tied: bool) -> ModelSpec:
        layer = Layer((Attention(heads, kv, hidden // heads),), DenseMlp(width, gated), 2 * hidden)
        return ModelSpec(name, "dense", hidden, vocab, 1 << 21, (layer,) * layers, tied, hidden)

    choices = [build(g, t) for g in (False, True) for t in (True, False)]
    return min(choices, key=lambda m: abs(m.params_total - stated))


def model_of(row: dict[str, str]) -> ModelSpec:
    """The model of a row, or SkipRowError."""
    name = tables()["models"].get(row["model"])
    if name:
        return load_model(name, offline=True)
    dims = tables()["dimensions"].get(row["model"])
    if dims:
        return _dense(row["model"], tuple(dims), number(row["params_b"]) * 1e9)
    special = special_model(row["model"])
    if special is not None:
        return special
    if row["layers"] and row["ffn"] and "x" not in row["ffn"] and row["kv_heads"] != "MLA":
        return dense_model(row)
    try:
        return load_model(row["model"], offline=True)
    except PlannerError:
        raise SkipRowError(
            f"dimensions of {row['model']} are not in the row, and no known model has its name"
        ) from None


@cache
def special_model(name: str) -> ModelSpec | None:
    """Models of training_rows.yaml that no configuration of one kind of layer describes: encoder-decoders, variants, experts."""
    table = tables()
    if name in table["encoder_decoders"]:
        return _encoder_decoder(name, table["encoder_decoders"][name])
    if name in table["variants"]:
        return _variant_of(name, **table["variants"][name])
    dims = table["experts"].get(name)
    if dims is None:
        return None
    layers, hidden, heads, kv, experts, active, width, shared, vocab = dims
    mlp = MoeMlp(experts, active, width, shared, router_params=experts * hidden)
    layer = Layer((Attention(heads, kv, hidden // heads),), mlp, 2 * hidden)
    return ModelSpec(name, "moe", hidden, vocab, 1 << 21, (layer,) * layers, True, hidden)


def _encoder_decoder(name: str, dims: list[Any]) -> ModelSpec:
    """Encoder and decoder as one stack; a decoder layer has a second attention over the encoder's output."""
    encoder, decoder, hidden, heads, head_dim, width, vocab, tied = dims
    attention = Attention(heads, heads, head_dim)
    first = Layer((attention,), DenseMlp(width, True), 2 * hidden)
    second = Layer((attention, attention), DenseMlp(width, True), 3 * hidden)
    layers = (first,) * encoder + (second,) * decoder
    return ModelSpec(name, "t5", hidden, vocab, 1 << 21, layers, bool(tied), 2 * hidden)


def _variant_of(name: str, like: str, experts: int, vocab: int) -> ModelSpec:
    """A known model with another number of experts and another vocabulary."""
    base, changed = load_model(like, offline=True), {}
    for layer, _ in base.layer_groups:
        if isinstance(layer.mlp, MoeMlp):
            router = layer.mlp.router_params * experts // layer.mlp.experts
            changed[layer] = replace(layer, mlp=replace(layer.mlp, experts=experts, router_params=router))
    return replace(base, name=name, vocab=vocab, layers=tuple(changed.get(x, x) for x in base.layers))


@lru_cache(maxsize=16)
def listed_model(name: str, dims: tuple[Any, ...]) -> ModelSpec:
    """A model of equal layers: layers, hidden, width, heads, key/value heads, vocabulary, whether gated."""
    layers, hidden, width, heads, kv, vocab, gated = dims
    layer = Layer((Attention(heads, kv, hidden // heads),), DenseMlp(width, bool(gated)), 2 * hidden)
    return ModelSpec(name, "dense", hidden, vocab, 1 << 21, (layer,) * layers, True, hidden)

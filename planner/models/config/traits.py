"""What a model_type implies and its config.json does not say: biases, norms, gating, tying. Data in traits.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Traits:
    """Block style of one model_type; the defaults are Llama's.

    norm: 'rms' (hidden weights), 'layer' (weights and biases), 'layer_nobias', 'none'; norms: norms of a block over
    hidden. q_bias, kv_bias, o_bias, mlp_bias: true, false, or the config field that says so (with '=' its default).
    qk_norm: '' | 'head' (one weight per head element) | 'full' (over all heads) | 'per_head' (each head its own) and
    '@field' appended when a config field switches it. positions: rows of learned positions beyond max_position.
    known: False for the fallback, which the reader then states as an assumption.
    """

    norm: str = "rms"
    norms: int = 2
    final_norm: bool = True
    q_bias: bool | str = False
    kv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    gated: bool = True
    qk_norm: str = ""
    tied: bool = False
    positions: int | None = None
    head_bias: bool = False
    sinks: bool = False
    sliding_every: int | None = None
    output_gate: bool = False
    embedding_norms: int = 0
    expert_bias: bool = False
    router_bias: bool = False
    known: bool = True


@cache
def _table() -> dict[str, dict[str, object]]:
    raw: dict[str, dict[str, object]] = json.loads(
        files("planner.models.config").joinpath("traits.json").read_text("utf-8")
    )
    return raw


def traits_of(model_type: str) -> Traits:
    """Traits of a model_type; the Llama defaults with known=False when nobody wrote it down."""
    row = _table().get(model_type)
    if row is None:
        return Traits(known=False)
    while "like" in row:
        row = {**_table()[str(row["like"])], **{k: v for k, v in row.items() if k != "like"}}
    names = {f.name for f in fields(Traits)}
    return Traits(**{k: v for k, v in row.items() if k in names})  # type: ignore[arg-type]

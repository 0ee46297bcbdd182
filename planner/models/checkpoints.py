"""Published quantised checkpoints of known models: what can be started as it is. The table is checkpoints.yaml beside this file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

_ANSWERS = {"yes": True, "no": False}


@dataclass(frozen=True)
class Checkpoint:
    """One repository on the hub.

    repo: hub id to load. base: hub id of the model it was made from. precision: a name of precisions.yaml.
    format: how the weights lie on disk (FORMATS). verified: seen in two independent places, and the format is known.
    source: where the id was seen.
    """

    repo: str
    base: str
    precision: str
    format: str
    verified: bool
    source: str


FORMATS = ("compressed-tensors", "modelopt", "awq", "gptq", "fp8", "bnb")


@cache
def _raw() -> dict[str, Any]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = files("planner.models").joinpath("checkpoints.yaml").read_text("utf-8")
    raw: dict[str, Any] = yaml.load(text, loader)  # noqa: S506 (safe loader)
    return raw


def _key(hf_id: str) -> str:
    """A hub id as compared here: case does not count, and Meta-Llama-3.1-* is the older name of Llama-3.1-*."""
    return hf_id.strip().lower().replace("/meta-llama-3.1-", "/llama-3.1-")


@cache
def _rows() -> dict[str, tuple[tuple[str, str], ...]]:
    """Key of a base model to its (base, row)."""
    return {_key(base): tuple((base, row) for row in rows) for base, rows in _raw()["checkpoints"].items()}


def _read(base: str, row: str) -> Checkpoint:
    repo, precision, form, verified, keys = row.split()
    sources = _raw()["sources"]
    return Checkpoint(repo, base, precision, form, _ANSWERS[verified], "; ".join(sources[k] for k in keys.split(",")))


@cache
def _of_model(key: str) -> tuple[Checkpoint, ...]:
    return tuple(_read(base, row) for base, row in _rows().get(key, ()))


def published(hf_id: str, precision: str) -> tuple[Checkpoint, ...]:
    """Checkpoints of exactly that model in that precision, first choice first; empty when none is known.

    A model whose own repository holds the precision already (deepseek-ai/DeepSeek-V3 in fp8-block) is not in the table.
    """
    return tuple(c for c in _of_model(_key(hf_id)) if c.precision == precision)


def all_checkpoints() -> tuple[Checkpoint, ...]:
    """The whole table."""
    return tuple(c for key in _rows() for c in _of_model(key))

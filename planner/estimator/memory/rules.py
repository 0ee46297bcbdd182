"""Memory constants of an engine at a version: typed view of engines/memory.yaml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from planner.engines.records import read_yaml
from planner.errors import UnknownNameError


@dataclass(frozen=True)
class KvRules:
    """How the cache is cut: block_tokens a block; sliding 'grouped' | 'full' | 'window'; state 'page' | 'exact'."""

    block_tokens: int
    sliding: Literal["grouped", "full", "window"]
    group_ratio: float
    state: Literal["page", "exact"]
    tokens_of: Literal["blocks", "request"]


@dataclass(frozen=True)
class ActivationRules:
    """Peak of the forward pass and of the sampler's warm-up; see engines/memory.yaml."""

    sampler_bytes: float
    sampler_fixed_gib: float
    live_hidden: float
    body_hidden: float
    moe_workspace: bool
    outside_budget: bool = False


@dataclass(frozen=True)
class RuntimeRules:
    """Memory outside the framework's allocator; tp_* with fast links, tp_plain without."""

    single_gib: float
    pipeline_gib: float
    tp_base_gib: float
    tp_per_rank_gib: float
    tp_plain_gib: float


@dataclass(frozen=True)
class GraphRules:
    """CUDA graphs: base + layers x (per_layer + hidden x per_layer_hidden - log2(TP) x per_layer_tp + moe_layer)."""

    base_gib: float
    per_layer_gib: float
    per_layer_hidden_gib: float
    moe_layer_gib: float
    per_layer_tp_gib: float


@dataclass(frozen=True)
class Mxfp4Rules:
    """How the engine pads MXFP4 experts."""

    hidden_multiple: int
    intermediate_multiple: int
    pads_scales: bool


@dataclass(frozen=True)
class MemoryRules:
    """All of it for one engine and version range."""

    engine: str
    until: str
    default_share: float
    budget: Literal["share_of_total", "share_of_free", "all"]
    graphs_in_budget: bool
    kv: KvRules
    mxfp4: Mxfp4Rules
    rope_cache: bool
    vocab_multiple: int
    activation: ActivationRules
    runtime: RuntimeRules
    graphs: GraphRules
    source: str
    verified: bool
    reserve_share: float = 0.0

    def __hash__(self) -> int:
        return hash((self.engine, self.until))


def version_key(version: str) -> tuple[int, ...]:
    """(0, 19, 0) of '0.19.0', '~0.19', 'v0.19.0.dev3'; () when there is no number."""
    found = re.search(r"\d+(?:\.\d+)*", version)
    return tuple(int(p) for p in found[0].split(".")) if found else ()


@cache
def _table() -> dict[str, tuple[MemoryRules, ...]]:
    return {engine: tuple(_rules(engine, row) for row in rows) for engine, rows in read_yaml("memory.yaml").items()}


def _rules(engine: str, row: dict[str, Any]) -> MemoryRules:
    row = {k: v for k, v in row.items() if k != "date"}
    parts: dict[str, Any] = {
        "kv": KvRules(**row.pop("kv")),
        "mxfp4": Mxfp4Rules(**row.pop("mxfp4")),
        "activation": ActivationRules(**row.pop("activation")),
        "runtime": RuntimeRules(**row.pop("runtime")),
        "graphs": GraphRules(**row.pop("graphs")),
    }
    return MemoryRules(engine=engine, **parts, **row)


@cache
def memory_rules(engine: str, version: str = "") -> MemoryRules:
    """Rules of the engine at that version (the newest when the version is empty or has no number)."""
    table = _table()
    if engine not in table:
        raise UnknownNameError("engine", engine, table)
    key = version_key(version)
    ranges = table[engine]
    return next((r for r in ranges if key and key < version_key(r.until)), ranges[-1])

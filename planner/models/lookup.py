"""The offline registry: names and aliases to pinned dimensions (registry/*.jsonl, one model a line).

A line holds: id, aliases, also (repositories of the same shape), params (exact published total) or published (its
rounded figure, with tolerance), source, config (the fields of config.json that decide the shape), gated, license.
What bare sizes mean is in the aliases: 8b and 405b Llama 3.1, 70b Llama 3.3, 14b and 32b Qwen3, 7b and 72b Qwen2.5.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

Record = dict[str, Any]

_SUFFIXES = (
    (re.compile(r"[-_. ](fp8[-_]dynamic|fp8|w8a8[-_]fp8)$"), "fp8"),
    (re.compile(r"[-_. ](quantized[-_.])?(w8a8|int8)$"), "int8-w8a8"),
    (re.compile(r"[-_. ](quantized[-_.])?w4a16$"), "int4-gptq"),
    (re.compile(r"[-_. ](gptq[-_]int4|gptq[-_]4bit|gptq)$"), "int4-gptq"),
    (re.compile(r"[-_. ](awq[-_]int4|awq[-_]4bit|awq)$"), "int4-awq"),
    (re.compile(r"[-_. ](unsloth[-_])?bnb[-_]4bit$"), "bnb-nf4"),
    (re.compile(r"[-_. ](nvfp4|fp4)$"), "nvfp4"),
    (re.compile(r"[-_. ](fp16)$"), "fp16"),
    (re.compile(r"[-_. ](bf16)$"), "bf16"),
)


def key_of(name: str) -> str:
    """A name without case, separators and surrounding space, for comparison."""
    return re.sub(r"[\s_\-]+", "", name.strip().lower())


@cache
def records() -> tuple[Record, ...]:
    """All models of the registry, in the order of the files."""
    folder = files("planner.models").joinpath("registry")
    found: list[Record] = []
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".jsonl"):
            found += [json.loads(line) for line in entry.read_text("utf-8").splitlines() if line]
    return tuple(found)


@cache
def _index() -> dict[str, tuple[Record, str]]:
    """Key to (record, repository id): aliases and full ids first, then the bare repository names."""
    index: dict[str, tuple[Record, str]] = {}
    for record in records():
        for alias in record["aliases"]:
            index[key_of(alias)] = (record, record["id"])
        for repo in (record["id"], *record.get("also", ())):
            index[key_of(repo)] = (record, repo)
    for record in records():
        for repo in (record["id"], *record.get("also", ())):
            index.setdefault(key_of(repo.rpartition("/")[2]), (record, repo))
    return index


def find(ref: str) -> tuple[Record, str] | None:
    """(record, repository id) of a name or alias; None when unknown."""
    return _index().get(key_of(ref))


def find_repackaged(ref: str) -> tuple[Record, str, str] | None:
    """(record of the base model, its id, precision) of a repackaging known by its suffix (-FP8, -AWQ, ...)."""
    lowered = ref.strip().lower()
    for pattern, precision in _SUFFIXES:
        match = pattern.search(lowered)
        if match:
            base = ref.strip()[: match.start()]
            found = find(base) or find(base.rpartition("/")[2])
            if found:
                return found[0], found[1], precision
    return None


def all_names() -> list[str]:
    """Everything that find() knows: aliases and repository ids."""
    return sorted(
        {a for r in records() for a in r["aliases"]}
        | {repo for r in records() for repo in (r["id"], *r.get("also", ()))}
    )

"""Which engine can start which published checkpoint; the table is formats.yaml beside this file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from planner.engines.records import read_yaml
from planner.errors import UnknownNameError
from planner.models.checkpoints import Checkpoint, published


@dataclass(frozen=True)
class Loader:
    """How one engine loads one format: the precisions it takes, and what it is told (None = it reads the files)."""

    precisions: tuple[str, ...]
    flag: str | None


@cache
def _table() -> dict[str, dict[str, Loader]]:
    return {
        engine: {form: Loader(tuple(row["precisions"]), row["flag"]) for form, row in entry["formats"].items()}
        for engine, entry in read_yaml("formats.yaml").items()
    }


def loaders(engine: str) -> dict[str, Loader]:
    """Format to Loader of one engine; UnknownNameError for an engine that is not in the table."""
    if engine not in _table():
        raise UnknownNameError("engine", engine, _table())
    return _table()[engine]


def checkpoint_for(engine: str, hf_id: str, precision: str) -> Checkpoint | None:
    """The published checkpoint of that model to load there: verified ones first, then in the order of the table; None = none known."""
    formats = loaders(engine)
    fitting = [
        c for c in published(hf_id, precision) if c.format in formats and precision in formats[c.format].precisions
    ]
    return min(fitting, key=lambda c: not c.verified, default=None)


def load_flag(engine: str, checkpoint: Checkpoint) -> str | None:
    """What the engine is told to load it, in place of EngineSpec's flag for the precision; None = nothing."""
    loader = loaders(engine).get(checkpoint.format)
    return loader.flag if loader else None

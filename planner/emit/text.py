"""Pieces of shell and YAML: quoting, option lists, headers. Nothing here knows an engine."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

HEADER = "Written by `planner emit`; edits are lost when it runs again."


class Shell(str):
    """A word that is shell already and must not be quoted, such as '"$MODEL"'."""

    __slots__ = ()


Word = str | int | float


def word(value: Word) -> str:
    """value as one shell word."""
    return str(value) if isinstance(value, Shell) else shlex.quote(str(value))


def options(rows: Iterable[Sequence[Word]], indent: str = "    ") -> str:
    """One option a line, for a bash array."""
    return "\n".join(indent + " ".join(word(w) for w in row) for row in rows)


def comment(lines: Iterable[str], mark: str = "#") -> str:
    """Lines as comments; callers pass text without line breaks."""
    return "\n".join(f"{mark} {line}".rstrip() for line in lines)


def to_yaml(*documents: Any, notes: Sequence[str] = ()) -> str:
    """YAML documents under our header; multi-line strings as literal blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent)
    body = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)
    return f"{comment([HEADER, *notes])}\n{body}"

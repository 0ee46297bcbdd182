"""Names of fields in a plan file: one that no record has is a slip of the pen, and would be dropped without a word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from planner.errors import PlanFileError, UnknownNameError
from planner.plan_check import cut


def check_fields(tree: Mapping[str, Any], kind: type, path: str = "") -> None:
    """Raises PlanFileError, with the nearest names, for the first field of the tree that the record (or one inside it) has not."""
    hints = get_type_hints(kind)
    for name, value in tree.items():
        if name not in hints:
            where = f" in {path}" if path else ""
            error = UnknownNameError(f"field{where} of the plan", cut(str(name)), hints)
            raise PlanFileError(error.what, "", f"{error.next_step} Mend that field, or solve again.")
        inner = next(_records(hints[name]), None)
        if inner is not None:
            for place, part in _parts(value, get_origin(hints[name]) is dict, f"{path}.{name}" if path else name):
                check_fields(part, inner, place)


def _records(hint: Any) -> Iterator[type]:
    """Dataclasses in a type hint."""
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for part in get_args(hint):
        yield from _records(part)


def _parts(value: Any, by_name: bool, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The records in a value, with their place: itself, those of a list, or (by_name) those of a mapping of any names."""
    if isinstance(value, list | tuple):
        for position, part in enumerate(value):
            yield from _parts(part, False, f"{path}.{position}")
    elif by_name and isinstance(value, Mapping):
        for name, part in value.items():
            yield from _parts(part, False, f"{path}.{cut(str(name))}")
    elif isinstance(value, Mapping):
        yield path, value

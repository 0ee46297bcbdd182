"""Typed, bounded access to a config.json. Whatever is wrong is a one-line ModelConfigError that names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from planner.errors import ModelConfigError

MAX_WIDTH = 10_000_000
MAX_CONTEXT = 1_000_000_000
MAX_LAYERS = 10_000
_NEXT = "Check the file; a config.json of the Hugging Face hub is expected."


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def whole(value: object, name: str, low: int = 1, high: int = MAX_WIDTH) -> int:
    """value as an integer within low..high; ModelConfigError otherwise (bools, strings, NaN and fractions included)."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value == int(value)
    if not ok:
        raise ModelConfigError(f"config field {name!r} must be a whole number, not {_shown(value)}", "", _NEXT)
    number: int = int(value)  # type: ignore[call-overload]
    if not low <= number <= high:
        raise ModelConfigError(f"config field {name!r} is {number}", f"it must lie between {low} and {high}", _NEXT)
    return number


class Fields:
    """One level of a config.json. Getters take alternative names; null counts as absent."""

    def __init__(self, raw: object, where: str = "") -> None:
        if not isinstance(raw, Mapping):
            raise ModelConfigError(f"config {where or 'file'} must be a JSON object, not {_shown(raw)}", "", _NEXT)
        self.raw, self.where = raw, where

    def has(self, *names: str) -> bool:
        """True when any of the names is present and not null."""
        return any(self.raw.get(n) is not None for n in names)

    def get(self, *names: str) -> Any:
        """The first present, non-null value, else None."""
        return next((self.raw[n] for n in names if self.raw.get(n) is not None), None)

    def named(self, *names: str) -> str:
        """The first name that is present, for messages."""
        return self.where + next((n for n in names if self.raw.get(n) is not None), names[0])

    def count(self, *names: str, default: int | None = None, low: int = 1, high: int = MAX_WIDTH) -> int:
        """A whole number; without default a missing field is an error that names it."""
        value = self.get(*names)
        if value is None:
            if default is None:
                raise ModelConfigError(
                    f"config has no field {(self.where + names[0])!r}", "the size cannot be known without it", _NEXT
                )
            return default
        return whole(value, self.named(*names), low, high)

    def optional(self, *names: str, low: int = 1, high: int = MAX_WIDTH) -> int | None:
        """A whole number or None when absent."""
        value = self.get(*names)
        return None if value is None else whole(value, self.named(*names), low, high)

    def number(self, *names: str, default: float) -> float:
        """A finite positive number."""
        value = self.get(*names)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or not 0 < value <= MAX_WIDTH
        ):
            raise ModelConfigError(
                f"config field {self.named(*names)!r} must be a positive number, not {_shown(value)}", "", _NEXT
            )
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelConfigError(
                f"config field {self.named(*names)!r} must be true or false, not {_shown(value)}", "", _NEXT
            )
        return value

    def text(self, *names: str, default: str = "") -> str:
        """A string."""
        value = self.get(*names)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelConfigError(
                f"config field {self.named(*names)!r} must be a string, not {_shown(value)}", "", _NEXT
            )
        return value

    def items(self, *names: str) -> list[Any] | None:
        """A list or None when absent."""
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MAX_LAYERS * 10:
            raise ModelConfigError(
                f"config field {self.named(*names)!r} must be a list, not {_shown(value)}", "", _NEXT
            )
        return value

    def indices(self, *names: str) -> set[int]:
        """A list of layer numbers, empty when absent."""
        return {whole(v, self.named(*names), 0, MAX_LAYERS) for v in self.items(*names) or []}

    def one_per_layer(self, layers: int, *names: str) -> list[Any] | None:
        """A list with an entry for each layer (more are cut off), None when absent or not a list."""
        if not isinstance(self.get(*names), list):
            return None
        found = self.items(*names) or []
        if len(found) < layers:
            raise ModelConfigError(
                f"config field {self.named(*names)!r} has {len(found)} entries for {layers} layers", "", _NEXT
            )
        return found[:layers]

    def level(self, *names: str) -> Fields | None:
        """A nested object or None when absent."""
        value = self.get(*names)
        return (
            None
            if value is None
            else Fields(value, self.where + next(n for n in names if self.raw.get(n) is not None) + ".")
        )

    def per_layer(self, names: tuple[str, ...], layers: int, default: int | None = None, low: int = 1) -> list[int]:
        """A whole number or a list of one per layer, spread over the layers."""
        value = self.get(*names)
        if not isinstance(value, list):
            return [self.count(*names, default=default, low=low)] * layers
        if len(value) != layers:
            raise ModelConfigError(
                f"config field {self.named(*names)!r} has {len(value)} entries for {layers} layers", "", _NEXT
            )
        return [whole(v, self.named(*names), low) for v in value]

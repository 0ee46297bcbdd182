"""What stands beside the language decoder: vision and audio towers, projectors, MTP heads."""

from __future__ import annotations

from planner.models.config.fields import Fields
from planner.models.spec import Layer, Tower


def towers_of(top: Fields, text: Fields, layers: tuple[Layer, ...]) -> tuple[Tower, ...]:
    """All towers that the config states."""
    return ()

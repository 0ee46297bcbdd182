"""Launch files of a training plan. Entry: files_by_target, called by planner.emit."""

from __future__ import annotations

from planner.emit.train.targets import files_by_target

__all__ = ["files_by_target"]

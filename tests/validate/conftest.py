"""Tests of the built-in client do not depend on load tools that this machine has."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_load_tools(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tool is found, except where tools are what is tested or a real engine runs."""
    if not request.module.__name__.endswith(("test_engine_bench", "test_engine_real")):
        monkeypatch.setattr("planner.validate.engine_bench.installed", lambda bench, env: None)

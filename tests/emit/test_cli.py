"""The command, with the plan reader stood in for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import planner.engines.plan_facts
from planner.cli.emit import emit
from planner.errors import InvalidValueError
from tests.emit.plans import GOLDEN


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(planner.engines.plan_facts, "read_plan", lambda _: GOLDEN["vllm-owned-4090"], raising=False)
    made = typer.Typer()
    made.command()(emit)
    return made


def test_writes_and_prints_the_paths(app: typer.Typer, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan.yaml", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    assert sorted(json.loads(done.stdout)["files"]) == sorted(str(p) for p in tmp_path.iterdir())


def test_targets_and_refusal(app: typer.Typer, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan.yaml", "--out", str(tmp_path), "--target", "monitor", "--target", "notes"])
    assert done.stdout.split() == [str(tmp_path / n) for n in ("serve.sh", "monitor.sh", "LAUNCH.md")]
    done = CliRunner().invoke(app, ["plan.yaml", "--out", str(tmp_path), "--target", "skypilot"])
    assert isinstance(done.exception, InvalidValueError)

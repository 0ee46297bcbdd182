"""Golden files: every launch file of a good set of plans. PLANNER_UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.emit import render
from tests.emit.plans import GOLDEN

FOLDER = Path(__file__).parent / "golden"


def kept_as(file: str) -> str:
    """Emitted Python is kept under another name, so that linters of this repository pass it by."""
    return f"{file}.txt" if file.endswith(".py") else file


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    texts, folder = {kept_as(k): v for k, v in render(GOLDEN[name]).items()}, FOLDER / name
    if os.environ.get("PLANNER_UPDATE_GOLDEN"):
        folder.mkdir(parents=True, exist_ok=True)
        for stale in set(os.listdir(folder)) - set(texts):
            (folder / stale).unlink()
        for file, text in texts.items():
            (folder / file).write_text(text, "utf-8")
    assert {p.name: p.read_text("utf-8") for p in folder.iterdir()} == texts


def test_no_golden_folder_is_left_over() -> None:
    assert {p.name for p in FOLDER.iterdir()} == set(GOLDEN)


def test_render_is_deterministic_and_looks_at_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = {name: render(plan) for name, plan in GOLDEN.items()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MODEL", "other")
    assert before == {name: render(plan) for name, plan in GOLDEN.items()}

"""Writing: whole files or none, nothing foreign lost, clear refusals."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from planner.emit import PLAN_FILE, TARGETS, render, write_files
from planner.errors import InputError, InvalidValueError, NoPlanError, PlanFileError, UnknownNameError
from planner.plan import load_plan
from tests.emit.plans import GOLDEN, offer, plan

PLAN = GOLDEN["vllm-tp4"]


def test_writes_what_render_says_and_scripts_can_be_run(tmp_path: Path) -> None:
    paths = write_files(PLAN, tmp_path / "a/b")
    written = {p.name: p.read_text("utf-8") for p in paths}
    assert load_plan(tmp_path / "a/b" / PLAN_FILE) == PLAN
    del written[PLAN_FILE]
    assert written == render(PLAN)
    assert all(os.access(p, os.X_OK) == p.read_text().startswith("#!") for p in paths)
    assert {p.name for p in (tmp_path / "a/b").iterdir()} == {PLAN_FILE, *render(PLAN)}


def test_own_files_are_replaced_foreign_ones_are_not(tmp_path: Path) -> None:
    write_files(PLAN, tmp_path)
    write_files(PLAN, tmp_path)
    (tmp_path / "serve.sh").write_text("#!/bin/sh\nmine\n")
    before = {p.name: p.read_text() for p in tmp_path.iterdir()}
    with pytest.raises(InvalidValueError, match=r"serve\.sh"):
        write_files(GOLDEN["vllm-two-replicas"], tmp_path)
    assert before == {p.name: p.read_text() for p in tmp_path.iterdir()}
    write_files(PLAN, tmp_path, force=True)
    assert (tmp_path / "serve.sh").read_text() == render(PLAN)["serve.sh"]


def test_ctrl_c_leaves_whole_files_and_nothing_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [], Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_files(PLAN, tmp_path)
    left = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert len(left) == 2
    texts = render(PLAN)
    assert {name: text for name, text in left.items() if name != PLAN_FILE}.items() <= texts.items()


def test_ctrl_c_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "chmod", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_files(PLAN, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_targets(tmp_path: Path) -> None:
    assert [p.name for p in write_files(PLAN, tmp_path / "k", targets=["kubernetes"])] == ["kubernetes.yaml"]
    assert [p.name for p in write_files(PLAN, tmp_path / "s", targets=["slurm"])] == ["serve.sh", "serve.slurm"]
    with pytest.raises(UnknownNameError, match="kubernetes"):
        write_files(PLAN, tmp_path, targets=["kubernets"])
    with pytest.raises(InvalidValueError, match="your own"):
        write_files(GOLDEN["vllm-owned-4090"], tmp_path, targets=["skypilot"])
    assert set(TARGETS) >= {"serve", "notes"}


def test_a_file_in_the_way_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="--out"):
        write_files(PLAN, tmp_path / "file")


def test_nothing_to_launch_raises_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoPlanError):
        write_files(replace(PLAN, status="infeasible", deployment=None), tmp_path / "none")
    with pytest.raises(PlanFileError, match="serving"):
        render(replace(PLAN, task="train"))
    with pytest.raises(PlanFileError, match="machines"):
        render(plan(tp=8, dp=3, offers=(offer(count=2),)))
    with pytest.raises(InvalidValueError, match="span"):
        render(plan("70b", "transformers", tp=16, offers=(offer(count=2),)))
    with pytest.raises(InvalidValueError, match="KV-cache"):
        render(plan("8b", "transformers", kv="fp8"))
    with pytest.raises(InvalidValueError, match="model's dtype"):
        render(plan("8b", "transformers", precision="fp16", kv="bf16"))
    with pytest.raises(InvalidValueError, match="shard"):
        render(plan("8b", "transformers", precision="bnb-nf4", tp=2))
    with pytest.raises(InvalidValueError, match="does not run"):
        render(plan(precision="bnb-nf4"))
    assert not (tmp_path / "none").exists()


def test_files_of_an_earlier_plan_are_removed_and_others_stay(tmp_path: Path) -> None:
    first, second = GOLDEN["tensorrt-llm-fp8"], GOLDEN["vllm-owned-4090"]
    write_files(first, tmp_path)
    (tmp_path / "notes.txt").write_text("mine", "utf-8")
    written = {p.name for p in write_files(second, tmp_path)}
    assert {p.name for p in tmp_path.iterdir()} == written | {"notes.txt"}

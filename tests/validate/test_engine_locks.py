"""Locks that an interrupted build of DeepSpeed's operators leaves: ours are removed, those of others named, no other touched."""

import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from planner.cli.main import run
from planner.validate.engine_locks import build_locks, extensions_root, ownerless, remove_left
from planner.validate.engine_process import Group
from tests.train_emit.plans import tiny
from tests.validate.engine_helpers import saved

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")

BUILD = (
    "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('building', flush=True); time.sleep(60)"
)


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """Where DeepSpeed's build would put its lock."""
    root = tmp_path / "extensions"
    (root / "deepspeed_shm_comm").mkdir(parents=True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(root))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return root / "deepspeed_shm_comm" / "lock"


def validate(tmp_path, script):
    files = tmp_path / "files"
    files.mkdir()
    (files / "launch.sh").write_text(script)
    path = saved(tiny("deepspeed", zero_stage=2), tmp_path)
    return run(["validate", str(path), "--level", "engine", "--files", str(files), "--cpu", "--timeout", "2s"])


def test_a_build_that_is_stopped_leaves_no_lock(lock, tmp_path, capsys):
    (tmp_path / "build.py").write_text(BUILD)
    assert validate(tmp_path, f"exec {sys.executable} {tmp_path / 'build.py'} {lock}\n") == 2
    err = capsys.readouterr().err
    assert "building" in err
    assert "left a lock" not in err
    assert not lock.exists()


def test_a_stale_lock_is_the_named_cause_and_stays(lock, tmp_path, capsys):
    lock.touch()
    os.utime(lock, (1e9, 1e9))
    assert validate(tmp_path, f"while [ -e {lock} ]; do sleep 0.1; done\n") == 2
    err = capsys.readouterr().err
    assert f"left a lock, and DeepSpeed waits for it: {lock}" in err
    assert "Remove the lock" in err
    assert lock.exists()


def test_the_lock_of_a_build_that_runs_is_left_alone(lock, tmp_path):
    began = time.time()
    before = build_locks(lock.parents[1])
    with lock.open("x"):
        assert ownerless([lock]) == ()
        remove_left(lock.parents[1], before, began)
        assert lock.exists()
        group = Group(["true"], dict(os.environ), tmp_path, tmp_path / "log")
        assert group.stale_locks() == ()
        group.stop()
        assert lock.exists()
    remove_left(lock.parents[1], before, began)
    assert not lock.exists()


def test_the_folder_is_where_torch_builds(tmp_path, monkeypatch):
    cpp = pytest.importorskip("torch.utils.cpp_extension")
    for name, value in (("TORCH_EXTENSIONS_DIR", None), ("XDG_CACHE_HOME", tmp_path / "x"), ("HOME", tmp_path)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    place = Path(cpp._get_build_directory("made", False))
    (place / "lock").touch()
    assert list(build_locks(extensions_root(os.environ))) == [place / "lock"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert extensions_root(os.environ) == tmp_path / ".cache" / "torch_extensions"

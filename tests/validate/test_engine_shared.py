"""Shared memory that DeepSpeed leaves on CPUs: ours goes however the run ended, that of others stays."""

import mmap
import os
import sys
import tempfile
import time

import pytest

from planner.cli.main import run
from planner.validate import engine_shared
from planner.validate.engine_process import Group, free_port
from planner.validate.engine_shared import deepspeed_buffers
from tests.train_emit.plans import tiny
from tests.validate.engine_helpers import buffers, saved

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is found through /dev/shm and /proc")

LEAVES = 'echo x >"/dev/shm/deepspeed_allreduce_buffer_$(id -u)_127.0.0.1_${MASTER_PORT}_1"\n'


@pytest.mark.parametrize("end", ["exit 1", "exit 0", "kill -9 $$", "sleep 60"])
def test_nothing_is_left_however_the_script_ends(end, monkeypatch, capsys, tmp_path):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    files, port = tmp_path / "files", free_port()
    files.mkdir()
    (files / "launch.sh").write_text(LEAVES + f"touch {tmp_path}/came\n{end}\n")
    words = ["--files", str(files), "--cpu", "--port", str(port), "--timeout", "2s"]
    assert run(["validate", str(saved(tiny("deepspeed", zero_stage=2), tmp_path)), "--level", "engine", *words]) == 2
    assert (tmp_path / "came").exists(), capsys.readouterr().err
    assert buffers(port) == []


@pytest.fixture
def place(monkeypatch, tmp_path):
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(engine_shared, "SHARED_MEMORY", shared)
    return shared


def made(place, name):
    path = place / f"deepspeed_allreduce_buffer_{name}"
    path.write_bytes(b"x" * 4096)
    return path


def test_only_those_of_the_run_itself(place):
    uid, env = os.getuid(), {"MASTER_PORT": "2900", "MASTER_ADDR": "10.0.0.7"}
    ours = {made(place, f"{uid}_127.0.0.1_2900_0"), made(place, f"{uid}_10.0.0.7_2900_12")}
    for name in (
        f"{uid}_127.0.0.1_29001_0",
        f"{uid + 1}_127.0.0.1_2900_0",
        f"{uid}_10.0.0.8_2900_0",
        f"{uid}_127.0.0.1_2900_x",
    ):
        made(place, name)  # fmt: skip
    (place / "psm_other").touch()
    now = time.time()
    assert deepspeed_buffers(env, now) == ours
    assert deepspeed_buffers(env, now + 60) == set()  # they are older than the run
    assert deepspeed_buffers({}, now) == set()
    assert deepspeed_buffers({"MASTER_PORT": "2900*"}, now) == set()


def test_one_that_somebody_maps_is_left(place, tmp_path):
    path = made(place, f"{os.getuid()}_127.0.0.1_2900_0")
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        group = Group(["true"], {"MASTER_PORT": "2900"}, tmp_path, tmp_path / "log")
        group.began -= 60
        group.stop()
        assert path.exists()
    group.stop()
    assert not path.exists()

"""A second process that ends a run when planner itself was killed: SIGKILL leaves no `finally`. Linux (members are found through /proc).

Its standard input is a pipe of which planner alone has the other end: it ends when planner does, however that was. A word in it before says
that all is done. It is in a session of its own, without the run's mark, so that it is no part of what it ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from planner.validate.engine_locks import build_locks, extensions_root, remove_left
from planner.validate.engine_members import MARK, PROC, members, runs, send
from planner.validate.engine_shared import deepspeed_buffers, mapped, remove

GRACE_S, POLL_S = 10.0, 0.1
DONE = b"done"
ROOT = Path(__file__).resolve().parents[2]  # where the package lies


def guard(mark: str, env: Mapping[str, str], work: Path) -> subprocess.Popen[bytes] | None:
    """Start it before the run. env: of the run's script. work: the run's own folder. None where processes cannot be found."""
    if not (PROC / "self" / "environ").exists():
        return None
    given = {k: v for k, v in env.items() if k != MARK} | {"PYTHONPATH": str(ROOT), "TMPDIR": tempfile.gettempdir()}
    return subprocess.Popen(
        [sys.executable, "-m", "planner.validate.engine_guard", mark, str(work)], env=given, cwd="/", stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def dismiss(process: subprocess.Popen[bytes] | None) -> None:
    """All is done: it may go."""
    if process is None or process.returncode is not None:
        return
    try:
        process.communicate(DONE, timeout=GRACE_S)
    except (OSError, subprocess.TimeoutExpired):
        process.kill()
        process.wait()


def end(mark: str, began: float) -> None:
    """SIGTERM to all that carry the mark and what they started, SIGKILL to what is left, until none is; then their shared memory goes."""
    until, held = time.monotonic() + GRACE_S, set()
    number = signal.SIGTERM
    while known := members(mark):
        held |= mapped(known, began)
        send(known, number)
        number = signal.SIGKILL
        while time.monotonic() < until and any(runs(p) for p in known):
            time.sleep(POLL_S)
        until = time.monotonic() + POLL_S
    remove(held)
    remove(deepspeed_buffers(os.environ, began))


def main(mark: str, work: Path) -> None:
    """Wait for the end of planner; end the run unless it says that this is done."""
    began, builds = time.time(), extensions_root(os.environ)
    before = build_locks(builds)
    if sys.stdin.buffer.read():
        return
    end(mark, began)
    remove_left(builds, before, began)
    if work.parent == Path(tempfile.gettempdir()) and work.name.startswith("planner-"):
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

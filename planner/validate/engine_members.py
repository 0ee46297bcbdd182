"""Processes of one run, found three ways: the group of its script, the tree of parents, and a mark in the environment.

A launcher's workers may leave its process group (torchrun gives each a session of its own). The last two ways need /proc (Linux).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from planner.units import KIB

MARK = "PLANNER_RUN"
PROC = Path("/proc")
Process = tuple[int, str]  # pid and start time: a pid alone may be given to somebody else


def _stat(pid: int) -> tuple[int, int, str, str] | None:
    """(parent, group, state, start time) of a process; None when it is gone."""
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[1]), int(fields[2]), fields[0], fields[19]
    except (OSError, IndexError, ValueError):
        return None


def peak_bytes(pid: int) -> int:
    """VmHWM of a process in bytes (proc_pid_status(5): in KiB); 0 where it cannot be read."""
    try:
        lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
        return next(int(line.split()[1]) * KIB for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration, IndexError, ValueError):
        return 0


def runs(process: Process) -> bool:
    """Whether that very process still runs (a zombie does not)."""
    found = _stat(process[0])
    return found is not None and found[3] == process[1] and found[2] not in "ZX"


def members(mark: str, root: int | None = None) -> list[Process]:
    """Every process with this mark, `root` and its group, and all that they started."""
    table = {int(p.name): s for p in PROC.glob("[0-9]*") if (s := _stat(int(p.name))) is not None}
    wanted = f"{MARK}={mark}".encode()
    found = {pid for pid, s in table.items() if root in (pid, s[1]) or _has_mark(pid, wanted)}
    grown = True
    while grown:
        more = {pid for pid, s in table.items() if s[0] in found} - found
        found |= more
        grown = bool(more)
    return [(pid, table[pid][3]) for pid in found if table[pid][2] not in "ZX"]


def _has_mark(pid: int, wanted: bytes) -> bool:
    try:
        return wanted in (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False


def send(processes: Iterable[Process], number: signal.Signals) -> None:
    """A signal to each of them that still runs."""
    for process in processes:
        if runs(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process[0], number)


def send_group(leader: int, number: signal.Signals) -> None:
    """A signal to a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)

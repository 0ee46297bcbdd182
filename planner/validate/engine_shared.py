"""Shared memory that a run leaves in /dev/shm.

DeepSpeed on CPUs makes deepspeed_allreduce_buffer_<uid>_<MASTER_ADDR>_<MASTER_PORT>_<rank>, 66 MiB a rank, and never unlinks it
(csrc/cpu/comm/shm.cpp and shm_interface.cpp of 0.19).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from planner.validate.engine_members import PROC, Process

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
LOOPBACK = "127.0.0.1"  # DeepSpeed's launcher on one machine


def mapped(processes: Iterable[Process], began: float) -> set[Path]:
    """Files of shared memory that these processes map and that are younger than the run (began: a time.time())."""
    return {path for pid, _ in processes for path in _maps(pid) if _younger(path, began)}


def _maps(pid: int) -> set[Path]:
    found = set()
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "maps").read_text(errors="replace").splitlines():
            name = line.split(maxsplit=5)[-1]
            if name.startswith(f"{SHARED_MEMORY}/") and not name.endswith("(deleted)"):
                found.add(Path(name))
    return found


def _younger(path: Path, began: float) -> bool:
    try:
        return path.stat().st_ctime >= began - 1
    except OSError:
        return False


def deepspeed_buffers(env: Mapping[str, str], began: float) -> set[Path]:
    """Buffers of all ranks of a run with these variables: younger than it and mapped by nobody. None where it had no MASTER_PORT."""
    port, found = env.get("MASTER_PORT", ""), set()
    if not port.isdigit():
        return set()
    for address in {LOOPBACK, env.get("MASTER_ADDR") or LOOPBACK}:
        start = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_"
        with contextlib.suppress(OSError):
            found |= {p for p in SHARED_MEMORY.iterdir() if p.name.startswith(start) and p.name[len(start) :].isdigit()}
    found = {path for path in found if _younger(path, began)}
    return {p for p in found if not any(p in _maps(int(d.name)) for d in PROC.glob("[0-9]*"))}


def remove(paths: Iterable[Path]) -> None:
    """Remove them; processes that map one keep what they map."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

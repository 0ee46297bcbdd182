"""Processes that a validation starts: one script with all that it starts, stopped whole.

A launcher's workers may leave its process group (torchrun gives each a session of its own). They are found three ways: the
group, the tree of parents, and a mark in their environment; the last two need /proc (Linux).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from planner.errors import EngineFailedError, InputError
from planner.units import GIB, KIB
from planner.validate.engine_locks import build_locks, extensions_root, ownerless, remove_left

MARK = "PLANNER_RUN"
PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
GRACE_S, INTERRUPT_S, POLL_S = 20.0, 10.0, 0.1
Process = tuple[int, str]  # pid and start time: a pid alone may be given to somebody else


class Group:
    """A script in a session of its own with its log in a file. `stop` ends it and everything it started."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], folder: Path, log: Path) -> None:
        self.mark, self.log, self.began = f"planner-{secrets.token_hex(8)}", log, time.time()
        self.builds = extensions_root(env)
        self.locks = build_locks(self.builds)
        self.stale = ownerless(self.locks)
        try:
            with log.open("ab") as file:
                self.process = subprocess.Popen(
                    list(words), env={**env, MARK: self.mark}, cwd=folder, stdin=subprocess.DEVNULL, stdout=file,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise EngineFailedError(
                f"cannot start {words[0]}", error.strerror or str(error), "Check that it is installed and the disk."
            ) from error

    @property
    def exit_code(self) -> int | None:
        """Exit code of the script, None while it runs."""
        return self.process.poll()

    def text(self) -> str:
        """What the script has written so far."""
        return read_log(self.log)

    def peak_resident_gib(self) -> float:
        """Highest resident set so far of the fullest process (VmHWM of Linux); 0 where that cannot be read."""
        return max((_peak_bytes(pid) for pid, _ in self.alive()), default=0) / GIB

    def stale_locks(self) -> tuple[Path, ...]:
        """Locks of torch's builds that nobody held when this run began, and that are still there."""
        now = build_locks(self.builds)
        return ownerless(path for path in self.stale if now.get(path) == self.locks[path])

    def alive(self) -> list[Process]:
        """Every process of this run that is still there."""
        return _members(self.process.pid, self.mark)

    def stop(self, grace_s: float = GRACE_S, first_interrupt: bool = False) -> None:
        """SIGTERM to all, SIGKILL to what is left after grace_s; then the shared memory that only they had and locks of their builds go.

        first_interrupt: SIGINT to the script alone comes first, for launchers that then end ranks on other machines.
        """
        known = set(self.alive())
        held = _shared_memory(known, self.began)
        if first_interrupt and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(INTERRUPT_S)
        _signal(known, signal.SIGTERM)
        _signal_group(self.process.pid, signal.SIGTERM)
        until = time.monotonic() + grace_s
        while time.monotonic() < until:
            known |= set(self.alive())
            if self.process.poll() is not None and not any(_is(p) for p in known):
                break
            time.sleep(POLL_S)
        else:
            held |= _shared_memory(known, self.began)
            _signal(known, signal.SIGKILL)
        _signal_group(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        while time.monotonic() < until + GRACE_S and any(_is(p) for p in known):
            time.sleep(POLL_S)
        for path in held:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        remove_left(self.builds, self.locks, self.began)


def read_log(path: Path) -> str:
    """A log file as text, '' when there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _stat(pid: int) -> tuple[int, int, str, str] | None:
    """(parent, group, state, start time) of a process; None when it is gone."""
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[1]), int(fields[2]), fields[0], fields[19]
    except (OSError, IndexError, ValueError):
        return None


def _peak_bytes(pid: int) -> int:
    """VmHWM of a process in bytes (proc_pid_status(5): in KiB); 0 where it cannot be read."""
    try:
        lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
        return next(int(line.split()[1]) * KIB for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration, IndexError, ValueError):
        return 0


def _is(process: Process) -> bool:
    """Whether that very process still runs (a zombie does not)."""
    found = _stat(process[0])
    return found is not None and found[3] == process[1] and found[2] not in "ZX"


def _members(root: int, mark: str) -> list[Process]:
    table = {int(p.name): s for p in PROC.glob("[0-9]*") if (s := _stat(int(p.name))) is not None}
    wanted = f"{MARK}={mark}".encode()
    found = {pid for pid, s in table.items() if pid == root or s[1] == root or _has_mark(pid, wanted)}
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


def _signal(processes: set[Process], number: signal.Signals) -> None:
    for process in processes:
        if _is(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process[0], number)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _shared_memory(processes: set[Process], began: float) -> set[Path]:
    """Files of shared memory that these processes map and that are younger than the run."""
    found = set()
    for pid, _ in processes:
        with contextlib.suppress(OSError):
            for line in (PROC / str(pid) / "maps").read_text(errors="replace").splitlines():
                name = line.split(maxsplit=5)[-1]
                if name.startswith(f"{SHARED_MEMORY}/") and not name.endswith("(deleted)"):
                    found.add(Path(name))
    return {p for p in found if _age_ok(p, began)}


def _age_ok(path: Path, began: float) -> bool:
    try:
        return path.stat().st_ctime >= began - 1
    except OSError:
        return False


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the work inside as Ctrl-C does: through every `finally`."""

    def interrupt(*_: int | FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled(("SIGTERM", "SIGHUP"), interrupt):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not break the clearing up."""
    with _handled(("SIGINT", "SIGTERM", "SIGHUP"), signal.SIG_IGN):
        yield


@contextmanager
def workplace(prefix: str = "planner-") -> Iterator[Path]:
    """A temporary folder that is gone afterwards, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        with undisturbed():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _handled(names: Sequence[str], handler: Any) -> Iterator[None]:
    """Signals with this handler, and as before afterwards. Python lets only the main thread do that."""
    main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, n) for n in names if main and hasattr(signal, n)]
    before = {n: signal.signal(n, handler) for n in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def is_open(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something listens there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def free_port(wanted: int | None = None, following: int = 1) -> int:
    """`wanted` when it and the ports after it are free, else an error; without a wish, the first of so many free ports."""
    if wanted is not None:
        for port in range(wanted, wanted + following):
            if is_open(port):
                raise InputError(f"port {port} is taken", "something listens there", "Stop it, or give another --port.")
        return wanted
    for _ in range(50):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        if first + following <= 65535 and not any(is_open(first + i) for i in range(following)):
            return first
    raise InputError("no free ports were found", "", "Give --port.")

"""A script that a validation starts, with all that it starts: stopped whole, and what it leaves is removed."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from planner.errors import EngineFailedError, InputError
from planner.units import GIB
from planner.validate.engine_guard import dismiss, guard
from planner.validate.engine_locks import build_locks, extensions_root, ownerless, remove_left
from planner.validate.engine_members import MARK, Process, members, peak_bytes, runs, send, send_group
from planner.validate.engine_shared import deepspeed_buffers, mapped, remove

GRACE_S, INTERRUPT_S, POLL_S = 20.0, 10.0, 0.1


class Group:
    """A script in a session of its own with its log in a file. `stop` ends it and everything it started."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], folder: Path, log: Path) -> None:
        self.mark, self.log, self.began = f"planner-{secrets.token_hex(8)}", log, time.time()
        self.env, self.builds = env, extensions_root(env)
        self.locks = build_locks(self.builds)
        self.stale = ownerless(self.locks)
        try:
            self.guard = guard(self.mark, env, log.parent)
        except OSError as error:
            raise EngineFailedError(
                f"cannot start {sys.executable}", error.strerror or "", "Check the machine's limits."
            ) from error
        try:
            with log.open("ab") as file:
                self.process = subprocess.Popen(
                    list(words), env={**env, MARK: self.mark}, cwd=folder, stdin=subprocess.DEVNULL, stdout=file,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            dismiss(self.guard)
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
        return max((peak_bytes(pid) for pid, _ in self.alive()), default=0) / GIB

    def stale_locks(self) -> tuple[Path, ...]:
        """Locks of torch's builds that nobody held when this run began, and that are still there."""
        now = build_locks(self.builds)
        return ownerless(path for path in self.stale if now.get(path) == self.locks[path])

    def alive(self) -> list[Process]:
        """Every process of this run that is still there."""
        return members(self.mark, self.process.pid)

    def stop(self, grace_s: float = GRACE_S, first_interrupt: bool = False) -> None:
        """SIGTERM to all, SIGKILL to what is left after grace_s; then their shared memory and locks of their builds go.

        first_interrupt: SIGINT to the script alone comes first, for launchers that then end ranks on other machines.
        """
        known = set(self.alive())
        held = mapped(known, self.began)
        if first_interrupt and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(INTERRUPT_S)
        send(known, signal.SIGTERM)
        send_group(self.process.pid, signal.SIGTERM)
        until = time.monotonic() + grace_s
        while time.monotonic() < until:
            known |= set(self.alive())
            if self.process.poll() is not None and not any(runs(p) for p in known):
                break
            time.sleep(POLL_S)
        else:
            held |= mapped(known, self.began)
            send(known, signal.SIGKILL)
        send_group(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        while time.monotonic() < until + GRACE_S and any(runs(p) for p in known):
            time.sleep(POLL_S)
        remove(held)
        remove(deepspeed_buffers(self.env, self.began))
        remove_left(self.builds, self.locks, self.began)
        dismiss(self.guard)


def read_log(path: Path) -> str:
    """A log file as text, '' when there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


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

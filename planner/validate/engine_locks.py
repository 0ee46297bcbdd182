"""Locks of torch's build folders. A build that is killed leaves its lock, and every later run waits for it without end.

torch.utils.cpp_extension builds <root>/<name> under the file `lock` (file_baton.py): made with O_EXCL, held open while it builds, and
waited for as long as it exists. root: $TORCH_EXTENSIONS_DIR, else <cache>/torch_extensions/<python and accelerator>.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

PROC = Path("/proc")
Found = dict[Path, tuple[int, int]]  # lock -> (inode, time of change in ns)


def extensions_root(env: Mapping[str, str]) -> Path:
    """The folder under which torch builds for a process with these variables."""
    given = env.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given)
    cache = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME") or "~").expanduser() / ".cache")
    return Path(cache) / "torch_extensions"


def build_locks(root: Path) -> Found:
    """Locks of all builds under root."""
    found: Found = {}
    with contextlib.suppress(OSError):
        for path in (*root.glob("*/lock"), *root.glob("*/*/lock")):
            with contextlib.suppress(OSError):
                state = path.lstat()
                found[path] = (state.st_ino, state.st_mtime_ns)
    return found


def ownerless(locks: Iterable[Path]) -> tuple[Path, ...]:
    """Those that no process of this machine holds open; none where /proc cannot tell."""
    wanted = {str(path.resolve()): path for path in locks}
    if not wanted or not (PROC / "self" / "fd").is_dir():
        return ()
    for link in PROC.glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            wanted.pop(os.readlink(link), None)
    return tuple(sorted(wanted.values()))


def remove_left(root: Path, before: Found, began_s: float) -> None:
    """Remove the locks that came during our own run (since began_s, a time.time()) and that nobody holds."""
    new = [
        path
        for path, state in build_locks(root).items()
        if before.get(path) != state and state[1] >= (began_s - 1) * 1e9
    ]
    for path in ownerless(new):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

"""A plan written to a file, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from errno import EISDIR
from pathlib import Path

from planner.errors import InvalidValueError
from planner.plan import Plan, plan_to_json, plan_to_yaml


def write_plan(plan: Plan, out: Path, flag: str = "--out") -> None:
    """YAML, or JSON by suffix. Comment lines at the head of a YAML file that is replaced stay."""
    temporary: Path | None = None
    try:
        text = plan_to_json(plan) if out.suffix == ".json" else _head(out) + plan_to_yaml(plan)
        handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
        temporary = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        temporary.chmod(out.stat().st_mode & 0o777 if out.exists() else 0o644)
        temporary.replace(out)
    except OSError as error:
        raise InvalidValueError(f"cannot write {str(out)!r}", error.strerror or "", f"Give another {flag}.") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def check_writable(out: Path, flag: str = "--out") -> None:
    """InvalidValueError now, rather than after an hour of measuring, when the file cannot be written there."""
    try:
        if out.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        with tempfile.NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}."):
            pass
    except OSError as error:
        raise InvalidValueError(f"cannot write {str(out)!r}", error.strerror or "", f"Give another {flag}.") from None


def _head(out: Path) -> str:
    """Comment lines at the top of a YAML plan."""
    if not out.is_file():
        return ""
    lines = []
    with out.open("r", encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.startswith("#"):
                break
            lines.append(line)
    return "".join(lines)

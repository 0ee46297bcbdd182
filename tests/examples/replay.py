"""Run the command of an example in this process; what it prints and writes, made independent of the clock."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def names() -> list[str]:
    """All examples, by folder."""
    return sorted(p.parent.name for p in EXAMPLES.glob("*/command"))


def steady(text: str) -> str:
    """Times that the solver took are not part of an answer."""
    text = re.sub(r"wall_s: [\d.e-]+", "wall_s: 0.0", text)
    text = re.sub(r'"wall_s": [\d.e-]+', '"wall_s": 0.0', text)
    return re.sub(r"candidates, [\d.]+ s\)", "candidates)", text)


def replay(name: str) -> dict[str, str]:
    """File name -> text of everything the example's command prints (output.txt) and writes."""
    from planner.cli.main import run

    command = (EXAMPLES / name / "command").read_text("utf-8").strip()
    words = shlex.split(command)
    if words[:1] != ["planner"]:
        raise SystemExit(f"{name}: the command must start with planner")
    before = os.environ.get("SOURCE_DATE_EPOCH")
    os.environ["SOURCE_DATE_EPOCH"] = (EXAMPLES / "date").read_text("utf-8").split()[0]
    printed = io.StringIO()
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
            here = Path.cwd()
            os.chdir(folder)
            try:
                code = run(words[1:])
            finally:
                os.chdir(here)
            if code not in (0, 3):
                raise SystemExit(f"{name}: exit code {code}")
            files = {p.name: steady(p.read_text("utf-8")) for p in sorted(Path(folder).rglob("*")) if p.is_file()}
    finally:
        if before is None:
            os.environ.pop("SOURCE_DATE_EPOCH")
        else:
            os.environ["SOURCE_DATE_EPOCH"] = before
    return {"output.txt": steady(printed.getvalue()), **files}

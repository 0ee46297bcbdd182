"""Starts emitted files for real, on CPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planner.emit import write_files
from planner.plan import Plan
from tests.validate.engine_helpers import buffers


def _absent(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:  # of a package inside another, the outer one
        return True


def need(*packages: str) -> pytest.MarkDecorator:
    """Skips, with the reason, where a package is absent."""
    absent = [p for p in packages if _absent(p)]
    return pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)}")


@dataclass
class Run:
    code: int
    starts: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    text: str

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.steps]


def environment(folder: Path, **more: str) -> dict[str, str]:
    base = {
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "MASTER_PORT": str(random.randint(20000, 55000)),
        "MODEL": str(folder / "model"), "DATASET": str(folder / "text.txt"), "EXTRA_ARGS": "--cpu --learning-rate 1e-2 --save-every 4",
    }  # fmt: skip
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | base | {"PATH": path} | more


def emit(plan: Plan, out: Path) -> Path:
    write_files(plan, out, targets=("train",), force=True)
    return out


def start(plan: Plan, folder: Path, out: Path, timeout: int = 420, **env: str) -> Run:
    """Writes the files of the plan to `out` and runs launch.sh; folder holds model and text."""
    emit(plan, out)
    full = environment(folder, OUTPUT_DIR=str(out / "output"), **env)
    done = subprocess.run(
        ["bash", str(out / "launch.sh")],
        env=full,
        cwd=out,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert buffers(full["MASTER_PORT"]) == []
    return read(done.returncode, out, done.stdout + done.stderr)


def read(code: int, out: Path, text: str) -> Run:
    path = out / "output/metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return Run(code, [r for r in rows if r["event"] == "start"], [r for r in rows if r["event"] == "step"], text)

"""Plans and emitted-looking folders whose serve.sh starts the stand-in server."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.plan import Plan, plan_to_yaml
from tests.emit.plans import owned, plan

FAKE = Path(__file__).with_name("fake_openai.py")
LIMITS = {"ttft_s": 0.5, "tpot_s": 0.1, "e2e_s": None, "min_throughput_tokens_per_s": None}


def serving_plan(limits: dict[str, Any] | None = None, **load: Any) -> Plan:
    made = plan("8b", "vllm", offers=(owned("rtx-3090", 1),), seqs=8, length=512)
    work = {"input_tokens": 32, "output_tokens": 8, "rate_per_s": 40.0, "concurrency": None} | load
    request = {"model": "8b", "workload": work, "limits": LIMITS if limits is None else limits}
    return replace(made, request=request)


def fake_files(folder: Path, mode: str, ttft_ms: float = 50, tpot_ms: float = 10) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    engine = folder / "engine.py"  # a path of its own: tests that run beside this one are not taken for it
    shutil.copy(FAKE, engine)
    words = f'exec {sys.executable} {engine} "$PORT" {mode} {ttft_ms} {tpot_ms}'
    (folder / "serve.sh").write_text(f"#!/usr/bin/env bash\n{words}\n")
    return folder


def saved(made: Plan, folder: Path) -> Path:
    path = folder / "plan.yaml"
    path.write_text("# head\n" + plan_to_yaml(made))
    return path


def left_over(marker: str) -> list[str]:
    """Command lines of processes that still run and name the marker. ww: pytest loads readline, which exports COLUMNS=80, and ps cuts there."""
    found = []
    for line in subprocess.run(
        ["ps", "-ewwo", "stat,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines():
        if marker in line and not line.startswith("Z"):
            found.append(line)
    return found


def buffers(port: int | str) -> list[str]:
    """What DeepSpeed on CPUs left of a run whose ranks met at that port."""
    return [p.name for p in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*")]

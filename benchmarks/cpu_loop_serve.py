"""Serving rows of benchmarks.cpu_loop: small random Llamas under the emitted transformers server on one CPU device.

Planned for closed loops of a few users, started and loaded as `planner validate --level engine` does it. Compared: mean time per output
token, output tokens/s over the whole load, and the peak resident set of the server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import planner
from planner.emit import write_files
from planner.estimator.corrections import peak_gib
from planner.plan import Plan, load_plan
from planner.request import HardwareFilter, Pins, ServeRequest, Workload

METRICS = (("tpot_ms", "tpot"), ("throughput_tokens_per_s", "throughput"))


@dataclass(frozen=True)
class ServeCase:
    """A model, and users that each have one request in flight."""

    name: str
    hidden: int
    layers: int
    vocab: int
    users: int
    input_tokens: int
    output_tokens: int
    requests: int = 12


SERVE_CASES = (
    ServeCase("serve-tiny", 256, 4, 2048, users=1, input_tokens=64, output_tokens=32),
    ServeCase("serve-40m", 512, 8, 4096, users=4, input_tokens=64, output_tokens=32),
    ServeCase("serve-100m", 768, 10, 8192, users=1, input_tokens=256, output_tokens=32),
    ServeCase("serve-150m", 1024, 10, 8192, users=4, input_tokens=128, output_tokens=16),
)


def planned(case: ServeCase, model: Path, catalog: str, device: str) -> Plan:
    """The plan with everything pinned, on one device."""
    return planner.solve(
        ServeRequest(
            str(model),
            workload=Workload(case.input_tokens, case.output_tokens, rate_per_s=None, concurrency=case.users),
            hardware=HardwareFilter(owned=f"2x{device}", catalog_dirs=(catalog,)),
            pins=Pins(engine="transformers", tensor_parallel=1, data_parallel=1, max_num_seqs=max(case.users, 4)),
        )
    )


def measured(plan: Plan, case: ServeCase, folder: Path, timeout_s: int) -> dict[str, float]:
    """validation.measured of `planner validate --level engine`. Raises RuntimeError with the end of its output when it fails."""
    out, checked = folder / "files", folder / "checked.yaml"
    write_files(plan, out, force=True)
    here = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "planner", "validate", str(out / "plan.yaml"), "--level", "engine", "--files", str(out),
         "--requests", str(case.requests), "--env", here, "--out", str(checked), "--timeout", f"{timeout_s}s", "--json"],
        env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=timeout_s + 60, check=False,
    )  # fmt: skip
    if not checked.exists():
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    found: dict[str, float] = json.loads(json.dumps((load_plan(checked).validation or {})["measured"]))
    return found


def compare_serving(case: ServeCase, arguments: Any, make: Any, timeout_s: int) -> dict[str, Any]:
    """One line of the table: the best of all repeats. make(case, folder) writes the model."""
    with tempfile.TemporaryDirectory(prefix="cpu-loop-") as name:
        folder = Path(name)
        make(case, folder)
        plan = planned(case, folder / "model", arguments.catalog, arguments.device)
        if plan.memory is None:
            raise RuntimeError(f"{case.name}: {plan.infeasible}")
        runs = [measured(plan, case, folder, timeout_s) for _ in range(arguments.repeats)]
    row: dict[str, Any] = {"name": case.name, "parameters_m": round(plan.model.params_total / 1e6, 1)}
    for key, label in METRICS:
        values = [run[key] for run in runs]
        best = max(values) if label == "throughput" else min(values)
        predicted = plan.predicted[key].value
        row |= {f"{key}_predicted": round(predicted, 3), f"{key}_measured": round(best, 3)}
        row[f"{label}_error_percent"] = round((predicted / best - 1) * 100, 1)
    peak, total = max(run["peak_memory_gib"] for run in runs), peak_gib(plan) or plan.memory.total_gib
    row |= {"memory_gib_predicted": round(total, 3), "memory_gib_measured": round(peak, 3)}
    return row | {"memory_error_percent": round((total / peak - 1) * 100, 1)}

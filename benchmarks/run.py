"""Measure speed and memory: python -m benchmarks.run [--json] [--repeat 5]

Ratios, so that they mean the same on any machine: the cold main job against a bare import of CP-SAT in the same run, both from compiled
bytecode, as an installed package has it (some shells forbid Python to write it).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

MAIN_JOB = ["-m", "planner", "solve", "--model", "70b", "--goal", "cheapest", "--latency", "200ms"]
YARDSTICK = ["-c", "from ortools.sat.python import cp_model"]
BYTECODE = tempfile.TemporaryDirectory(prefix="planner-bytecode-")
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {
    "PYTHONPYCACHEPREFIX": BYTECODE.name
}
LIMITS = {"solve_over_import": 3.0, "solve_mb": 300.0, "help_s": 0.3, "rows_per_s": 1e6}


def cold(arguments: list[str]) -> tuple[float, float]:
    """Wall seconds and peak resident MB of one fresh interpreter."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)} failed with {status}")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def best(repeat: int, arguments: list[str]) -> tuple[float, float]:
    """Least wall time and its memory over some runs: what the machine can do when it is let alone."""
    return min(cold(arguments) for _ in range(repeat))


def timed(repeat: int, work: Callable[[], object]) -> float:
    """Least seconds of a call over some runs."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def estimator_rows_per_s(repeat: int) -> float:
    """Candidates a second through memory and time together, once the tables of their shards are made."""
    import numpy as np

    from planner.hardware.catalog import load_catalog
    from planner.models import load_model
    from planner.request import ServeRequest
    from planner.solver.study import make_study

    study = make_study(ServeRequest("70b"), load_model("70b"), load_catalog())
    pairs = study.pairs
    which = np.resize(np.unique(study.rows.pair), 200_000)
    load = np.full(len(which), 0.5)
    cap = np.full(len(which), 64, dtype=np.int64)
    pairs.time(which[:1000], load[:1000], cap[:1000])
    return len(which) / timed(repeat, lambda: (pairs.memory(which, cap), pairs.time(which, load, cap)))


def measure(repeat: int) -> dict[str, float]:
    """All figures."""
    import_s, import_mb = best(repeat, YARDSTICK)
    solve_s, solve_mb = best(repeat, MAIN_JOB)
    help_s, _ = best(repeat, ["-m", "planner", "--help"])
    return {
        "import_s": import_s,
        "import_mb": import_mb,
        "solve_s": solve_s,
        "solve_mb": solve_mb,
        "solve_over_import": solve_s / import_s,
        "help_s": help_s,
        "rows_per_s": estimator_rows_per_s(repeat),
        "self_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Print the figures; exit 1 when one is outside its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    figures = measure(options.repeat)
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        print(f"import of CP-SAT alone    {figures['import_s']:.2f} s, {figures['import_mb']:.0f} MB")
        print(f"cold main job             {figures['solve_s']:.2f} s, {figures['solve_mb']:.0f} MB")
        print(f"  ratio to the import     {figures['solve_over_import']:.2f}   (limit {LIMITS['solve_over_import']:g})")
        print(f"planner --help            {figures['help_s']:.2f} s   (limit {LIMITS['help_s']:g} s)")
        print(
            f"estimator                 {figures['rows_per_s'] / 1e6:.2f} million candidates/s   (wanted {LIMITS['rows_per_s'] / 1e6:g})"
        )
    over = [k for k in ("solve_over_import", "solve_mb", "help_s") if figures[k] > LIMITS[k]]
    over += ["rows_per_s"] if figures["rows_per_s"] < LIMITS["rows_per_s"] else []
    if over:
        print(f"outside the limit: {', '.join(over)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()

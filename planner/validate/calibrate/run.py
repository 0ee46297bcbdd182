"""Start the processes of a measurement, follow them, and stop them whatever happens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.errors import InputError, InvalidValueError, MissingExtraError, PlannerError
from planner.estimator.time.surfaces import read_data
from planner.hardware.catalog import load_catalog
from planner.hardware.names import gpu_names, name_key
from planner.units import GB, GIB, TERA
from planner.validate.calibrate.files import Measured, catalog_files, check_target, write
from planner.validate.calibrate.grid import Point
from planner.validate.calibrate.machine import Machine, find_machine
from planner.validate.engine_process import ending_on_signals, undisturbed, workplace

Progress = Callable[[str, float], None]
PATIENCE = 4.0
START_S = 180.0
CHECK_S = 0.2
END_S = 5.0


def calibrate(
    out: Path, device: str, processes: int | None, name: str | None, seconds: float, progress: Progress
) -> dict[str, Any]:
    """Measure this machine and write it to `out` as a catalog folder. Returns what a person wants to see."""
    check_target(out)
    _check_name(name)
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise MissingExtraError("transformers", "profile", "planner calibrate") from None
    machine = find_machine(device, processes)
    name = name or ("this-cpu" if machine.device == "cpu" else f"this-{machine.known.name if machine.known else 'gpu'}")
    with ending_on_signals():
        measured = measure(machine, seconds, progress)
    written = write(out, catalog_files(name, machine, measured, _lender(machine)))
    return summary(name, machine, measured) | {"folder": str(out), "files": [str(path) for path in written]}


def _check_name(name: str | None) -> None:
    """InvalidValueError for a name that the packaged catalog has: a measured device would silently stand in its place."""
    packaged = load_catalog()
    table = gpu_names(packaged)
    if name is not None and name_key(name) in table:
        raise InvalidValueError(
            f"--name {name!r} is {table[name_key(name)]} of the packaged catalog",
            "plans with this folder would take the measured device for it",
            f"Write for example --name this-{table[name_key(name)]}.",
        )


def summary(name: str, machine: Machine, m: Measured) -> dict[str, Any]:
    """The figures in short, as plain data."""
    return {
        "name": name, "devices": machine.devices, "device": machine.device, "model": machine.model, "software": machine.software,
        "rates": {
            "bf16_tflops": round(m.flops["bf16"] / TERA, 4), "fp32_tflops": round(m.flops["fp32"] / TERA, 4),
            "memory_gb_per_s": round(m.memory_bytes_per_s / GB, 2), "host_gb_per_s": round(m.host_bytes_per_s / GB, 2),
        },
        "points": {kernel: len(found) for kernel, found in m.points.items()}, "constants": m.constants, "disturbed": m.disturbed,
    }  # fmt: skip


def _lender(machine: Machine) -> str:
    """The packaged surface that stands in for what is not measured."""
    table = read_data("hardware_catalog.kernels", "borrow.yaml")
    known = machine.known
    if known and known.name in table["measured"]:
        return str(table["measured"][known.name])
    return str(table["by_vendor"][machine.vendor])


def measure(machine: Machine, seconds: float, progress: Progress) -> Measured:
    """Run the workers and read what rank 0 found. InputError when one fails or takes far too long."""
    known = machine.known
    with workplace("planner-calibrate-") as folder:
        settings = {
            "device": machine.device, "ranks": machine.devices, "threads": machine.threads or 0, "seconds": seconds,
            "usable_gib": machine.usable_bytes / GIB, "lender": _lender(machine), "result": str(folder / "result.json"),
            "peak_flops": known.peak_tflops.get("bf16", 0) * TERA if known else 0, "bandwidth": known.bandwidth_gb_per_s * GB if known else 0,
        }  # fmt: skip
        (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        _run(machine, folder, START_S + PATIENCE * seconds, progress)
        return _read(json.loads((folder / "result.json").read_text("utf-8")))


def _read(tree: dict[str, Any]) -> Measured:
    points = {k: [Point(tuple(at), value) for at, value in rows] for k, rows in tree["points"].items()}
    collectives = {k: [(float(a), float(b)) for a, b in rows] for k, rows in tree.get("collectives", {}).items()}
    return Measured(
        tree["memory_bytes_per_s"],
        tree["host_bytes_per_s"],
        tree["flops"],
        tree["measured"],
        points,
        collectives,
        tree.get("busy"),
    )


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(machine: Machine, rank: int, port: int) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    more = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(machine.devices), "MASTER_ADDR": "127.0.0.1"}
    more |= {"MASTER_PORT": str(port), "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    if machine.device == "cpu":
        more |= {"OMP_NUM_THREADS": str(machine.threads), "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | more


def _run(machine: Machine, folder: Path, limit_s: float, progress: Progress) -> None:
    """All ranks to their end. Whatever ends this function, no process stays behind."""
    command = [sys.executable, "-m", "planner.validate.calibrate.worker", str(folder / "settings.json")]
    port, running, logs = free_port(), [], []
    try:
        for rank in range(machine.devices):
            log = (folder / f"rank-{rank}.log").open("w+", encoding="utf-8")
            logs.append(log)
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            running.append(
                subprocess.Popen(
                    command, env=_environment(machine, rank, port), stdout=out, stderr=log, text=True, cwd=folder
                )
            )
        reader = threading.Thread(target=_follow, args=(running[0], progress), daemon=True)
        reader.start()
        _wait(running, logs, time.monotonic() + limit_s)
        reader.join(2)
    finally:
        with undisturbed():
            _end(running)
            for stream in [*logs, *(process.stdout for process in running if process.stdout)]:
                stream.close()


def _end(running: list[subprocess.Popen[str]]) -> None:
    """SIGTERM, and SIGKILL to what is left after END_S."""
    for process in running:
        if process.poll() is None:
            process.terminate()
    for process in running:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S)


def _follow(process: subprocess.Popen[str], progress: Progress) -> None:
    for line in process.stdout or ():
        try:
            row = json.loads(line)
            progress(str(row["stage"]), float(row["share"]))
        except (ValueError, KeyError, TypeError):  # something else that a library printed
            continue


def _wait(running: list[subprocess.Popen[str]], logs: list[Any], end: float) -> None:
    while True:
        codes = [process.poll() for process in running]
        bad = next((rank for rank, code in enumerate(codes) if code), None)
        if bad is not None:
            logs[bad].seek(0)
            raise _failure(codes[bad] or 1, logs[bad].read())
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            raise InputError(
                "the measurement did not end in time",
                "a process hangs or the machine is busy",
                "Try again, or lower --seconds.",
            )
        time.sleep(CHECK_S)


def _failure(code: int, text: str) -> PlannerError:
    """What a worker died of, in one line."""
    last = next((line for line in reversed(text.splitlines()) if line.strip()), f"exit code {code}")[:200]
    if code in (-9, 137) or "out of memory" in text.lower() or "MemoryError" in text:
        return InputError("the measurement ran out of memory", last, "Close other programs or lower --processes.")
    if "No space left" in text:
        return InputError("the measurement found no room on the disk", last, "Free some space in the temporary folder.")
    if "driver" in text.lower() and "cuda" in text.lower():
        return InputError("the GPU cannot be used", last, "Install the driver that this torch needs, or --device cpu.")
    return PlannerError("a process of the measurement failed", last, "Run again with PLANNER_TRACEBACK=1.")

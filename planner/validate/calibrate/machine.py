"""What the machine is: CPUs and memory, or the accelerators that torch sees."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import InvalidValueError, MissingExtraError
from planner.hardware.catalog import find_gpu, load_catalog
from planner.hardware.records import Gpu
from planner.units import GIB

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Machine:
    """device: cpu or cuda. devices: ranks that can run at once, each a share of a CPU or one GPU. known: the catalog's entry."""

    device: str
    devices: int
    model: str
    threads: int | None
    memory_bytes: float
    usable_bytes: float
    known: Gpu | None
    software: str
    vendor: str = "cpu"
    compute_capability: float | None = None


def torch_module() -> Any:
    """torch. Raises MissingExtraError when it is not installed."""
    try:
        import torch
    except ImportError:
        raise MissingExtraError("torch", "profile", "planner calibrate") from None
    return torch


def find_machine(device: str, processes: int | None) -> Machine:
    """The machine as it will be measured. device: auto, cpu or cuda.

    Errors: MissingExtraError without torch; InvalidValueError when cuda is asked for and torch sees none, or for more processes than
    cores or GPUs.
    """
    torch = torch_module()
    seen = torch.cuda.is_available()
    if device == "cuda" and not seen:
        raise InvalidValueError("torch sees no GPU", why_no_gpu(torch), "Measure the CPU with --device cpu.")
    return _gpus(torch, processes) if device == "cuda" or (device == "auto" and seen) else _cpu(torch, processes)


def why_no_gpu(torch: Any) -> str:
    """The reason in words, as far as torch tells."""
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return f"torch {torch.__version__} was built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0][:160]
    return "no device is visible (see CUDA_VISIBLE_DEVICES)"


def _count(processes: int | None, most: int, what: str) -> int:
    if processes is not None and not 1 <= processes <= most:
        raise InvalidValueError(
            f"--processes {processes} is out of range",
            f"this machine has {most} {what}",
            f"Write for example --processes {most}.",
        )
    return processes or min(2, most)


def _cpu(torch: Any, processes: int | None) -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = _count(processes, cores, "cores")
    total, free = memory_bytes()
    return Machine(
        "cpu", count, cpu_name(), cores // count, total / count, min(free, total) / count, None,
        f"torch {torch.__version__}, {cores} cores, {platform.system()} {platform.release()}",
    )  # fmt: skip


def _gpus(torch: Any, processes: int | None) -> Machine:
    there = torch.cuda.device_count()
    count = _count(processes, there, "GPUs") if processes is not None else there
    row = torch.cuda.get_device_properties(0)
    known = _known(row.name)
    total, nvidia = float(row.total_memory), torch.version.cuda is not None
    stack = f"CUDA {torch.version.cuda}" if nvidia else f"ROCm {torch.version.hip}"
    return Machine(
        "cuda",
        count,
        row.name,
        None,
        total,
        total,
        known,
        f"torch {torch.__version__}, {stack}",
        "nvidia" if nvidia else "amd",
        float(f"{row.major}.{row.minor}") if nvidia else None,
    )


def _known(name: str) -> Gpu | None:
    try:
        return find_gpu(name, load_catalog())
    except Exception:  # a card nobody knows is measured all the same
        return None


def cpu_name() -> str:
    """Model name of the processor."""
    try:
        rows = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((r.split(":", 1)[1].strip() for r in rows if r.startswith("model name")), platform.machine())


def memory_bytes() -> tuple[float, float]:
    """(all, free) bytes of host memory, within the limit of a container."""
    try:
        rows = dict(line.split(":", 1) for line in MEMINFO.read_text("utf-8").splitlines() if ":" in line)
        total, free = (float(rows[k].split()[0]) * 1024 for k in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError, IndexError):
        total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        free = 0.9 * total
    try:
        limit = float(CGROUP_LIMIT.read_text("utf-8"))
    except (OSError, ValueError):  # no limit: "max"
        limit = float("inf")
    return min(total, limit), min(free, limit)


__all__ = ["GIB", "Machine", "find_machine", "memory_bytes", "torch_module"]

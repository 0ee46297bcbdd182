"""Collectives between the processes of this machine, by size, and the line through them that a catalog link stands for."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from planner.validate.calibrate.clock import Device

SIZES = (1024, 16 * 1024, 256 * 1024, 2**20, 4 * 2**20, 16 * 2**20, 64 * 2**20)
CPU_LARGEST_BYTES = (
    16 * 2**20
)  # beyond 32 MiB buffers are fresh memory, which the estimate counts by itself (fresh_from_bytes)
SMALL_BYTES = 16 * 1024
LARGE_BYTES = 2**20
LEAST_RUNS = 4


def _each_s(device: Device, dist: Any, work: Callable[[], Any], budget_s: float) -> float:
    """Seconds of a collective: the shortest of runs whose number all ranks agree on."""
    torch = device.torch
    work()
    device.wait()
    start = time.perf_counter()
    work()
    device.wait()
    wanted = torch.tensor([max(LEAST_RUNS, min(60, int(budget_s / max(time.perf_counter() - start, 1e-6))))])
    wanted = wanted.to(device.name)
    dist.broadcast(wanted, 0)
    taken = []
    for _ in range(int(wanted.item())):
        start = time.perf_counter()
        work()
        device.wait()
        taken.append(time.perf_counter() - start)
    return min(taken)


def collectives(
    device: Device, dist: Any, ranks: int, budget_s: float, tick: Callable[[float], None]
) -> dict[str, list[tuple[float, float]]]:
    """(message bytes, seconds) of each collective that frameworks call. The message is what every rank ends up with, or starts from."""
    torch = device.torch
    found: dict[str, list[tuple[float, float]]] = {"all_reduce": [], "all_gather": [], "reduce_scatter": []}
    sizes = [size for size in SIZES if device.cuda or size <= CPU_LARGEST_BYTES]
    share = budget_s / (3 * len(sizes))
    for done, size in enumerate(sizes):
        count = size // 4 // ranks * ranks
        whole = torch.ones(count, dtype=torch.float32, device=device.name)
        part = torch.ones(count // ranks, dtype=torch.float32, device=device.name)
        works: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
        }
        for name, work in works.items():
            found[name].append((float(4 * count), _each_s(device, dist, work, share)))
        tick((done + 1) / len(sizes))
    return found


def link_of(rows: dict[str, list[tuple[float, float]]], ranks: int) -> dict[str, float]:
    """latency_us and busbw_gb_per_s of the all-gather, and how the others compare with it at large sizes.

    t = latency + wire / busbw, wire = (n - 1)/n message (collectives.py). all_reduce_factor: t / (2 t of all-gather);
    reduce_scatter_factor: t / t of all-gather.
    """
    gather = dict(rows["all_gather"])
    latency = median(s for size, s in gather.items() if size <= SMALL_BYTES)
    wire = (ranks - 1) / ranks
    large = [size for size in gather if size >= LARGE_BYTES]
    rate = median(wire * size / max(gather[size] - latency, 1e-9) for size in large)
    reduce, scatter = dict(rows["all_reduce"]), dict(rows["reduce_scatter"])
    return {
        "latency_us": latency * 1e6,
        "busbw_gb_per_s": rate / 1e9,
        "all_reduce_factor": median(reduce[size] / (2 * gather[size]) for size in large),
        "reduce_scatter_factor": median(scatter[size] / gather[size] for size in large),
    }

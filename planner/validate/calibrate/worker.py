"""One process of a measurement: python -m planner.validate.calibrate.worker SETTINGS.json (started by run.py, not by hand).

All ranks run the same work at once, so that cores and memory are shared as they are in use. Rank 0 writes progress to stdout, one
JSON line each, and the result to its file.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from planner.hardware.records import Gpu, KernelFile
from planner.units import GB, TERA
from planner.validate.calibrate import group, kernels, layers
from planner.validate.calibrate.clock import Device, shortest_s
from planner.validate.calibrate.files import kernel_text

SHARES = {
    "rates": 0.06,
    "gemm": 0.34,
    "prefill_attention": 0.14,
    "decode_attention": 0.14,
    "layer": 0.17,
    "collectives": 0.15,
}
TIMEOUT_MINUTES = 10


def main() -> None:
    """Measure as the settings say."""
    settings = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    rank = int(os.environ["RANK"])
    import torch
    import torch.distributed as dist
    import transformers

    transformers.logging.set_verbosity_error()
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    name = "cpu" if settings["device"] == "cpu" else f"cuda:{rank}"
    device = Device(torch, name, settings["threads"])
    if device.cuda:
        torch.cuda.set_device(rank)
    ranks = settings["ranks"]
    if ranks > 1:
        wait = dt.timedelta(minutes=TIMEOUT_MINUTES)
        dist.init_process_group("nccl" if device.cuda else "gloo", timeout=wait)
    found = _measure(device, settings, transformers, _Say(rank, ranks, dist))
    if ranks > 1:
        found["collectives"] = _collectives(device, settings, dist, rank)
        dist.destroy_process_group()
    if rank == 0:
        Path(settings["result"]).write_text(json.dumps(found), encoding="utf-8")


class _Say:
    """Progress of rank 0; a barrier before each stage, so that all ranks are in the same one."""

    def __init__(self, rank: int, ranks: int, dist: Any) -> None:
        self.rank, self.ranks, self.dist = rank, ranks, dist

    def stage(self, name: str) -> Any:
        if self.ranks > 1:
            self.dist.barrier()
        return lambda share: _tell(self.rank, name, share)


def _tell(rank: int, stage: str, share: float) -> None:
    if rank == 0:
        sys.stdout.write(json.dumps({"stage": stage, "share": share}) + "\n")
        sys.stdout.flush()


def _measure(device: Device, settings: dict[str, Any], transformers: Any, say: _Say) -> dict[str, Any]:
    torch, seconds = device.torch, float(settings["seconds"])
    tick, budget = say.stage("rates"), seconds * SHARES["rates"] / 6
    copy = kernels.memory_rate(device, budget)
    host = kernels.host_rate(device, budget)
    touch = kernels.first_touch(device, budget)
    fastest = kernels.product_rate(device, torch.bfloat16, budget)
    plain = kernels.product_rate(device, torch.float32, budget)
    tiny = device.random(16, 64, dtype=torch.bfloat16), device.random(64, 64, dtype=torch.bfloat16)
    floor = shortest_s(device, lambda: torch.nn.functional.linear(*tiny), budget)
    tick(1.0)
    roof = kernels.Roof(settings["peak_flops"] or fastest, settings["bandwidth"] or copy)
    room, points = kernels.room(device, settings["usable_gib"]), {}
    began, own = time.perf_counter(), time.thread_time()
    for kernel in kernels.MAKERS:
        tick = say.stage(kernel)
        points[kernel] = kernels.measure(device, kernel, roof, seconds * SHARES[kernel], room, tick)
    busy = None if device.now is time.perf_counter else (time.thread_time() - own) / (time.perf_counter() - began)
    surface = KernelFile("measured", kernel_text(points, settings["lender"], ""))
    floors = touch if device.cuda else {"kernel_floor_us": floor * 1e6, **touch}
    gpu = Gpu(
        "this", "cpu" if not device.cuda else "nvidia", "", 1.0, 1.0, roof.bytes_per_s / GB, {"bf16": roof.flops / TERA}, None, 4, None,
        kernels=surface, measured=floors, cpu_threads=settings["threads"] or None,
    )  # fmt: skip
    constants = _constants(device, gpu, transformers, seconds * SHARES["layer"], say.stage("layer"))
    return {
        "memory_bytes_per_s": copy, "host_bytes_per_s": host, "flops": {"bf16": fastest, "fp32": plain}, "measured": {**floors, **constants},
        "points": {k: [[list(p.at), p.efficiency] for p in found] for k, found in points.items()},
        "busy": busy,
    }  # fmt: skip


def _constants(device: Device, gpu: Gpu, transformers: Any, seconds: float, tick: Any) -> dict[str, float]:
    """What layers, loss and optimizer add to the kernels; each step uses what was found before it."""
    from dataclasses import replace

    share, found = seconds / 5, dict(gpu.measured)
    times = {shape: layers.layer_times(device, shape, transformers, share) for shape in layers.shapes(device)}
    tick(0.4)

    def now() -> Gpu:
        return replace(gpu, measured=dict(found))

    found |= layers.serving_constants(device, now(), times)
    found |= layers.attention_backward(device, share)
    found |= layers.training_constants(device, now(), times)
    tick(0.6)
    found |= layers.loss_passes(device, now(), share)
    found |= layers.optimizer_rate(device, now(), share)
    tick(1.0)
    return found


def _collectives(device: Device, settings: dict[str, Any], dist: Any, rank: int) -> dict[str, Any]:
    seconds = float(settings["seconds"]) * SHARES["collectives"]
    dist.barrier()
    return group.collectives(device, dist, settings["ranks"], seconds, lambda share: _tell(rank, "collectives", share))


if __name__ == "__main__":
    main()

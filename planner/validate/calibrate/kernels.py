"""Kernels of a device by shape, as roofline / measured time: matrix products, attention of a prompt and of one token.

The rooflines are those of hardware_catalog/kernels/README.md. A point is only timed when it is expected to end within its
share of the budget; what is left out is filled from its neighbours (grid.py).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from planner.units import GB, GIB, TERA
from planner.validate.calibrate.clock import Device, shortest_s
from planner.validate.calibrate.grid import Point, coarse_first

COLD_BYTES = 64 * 2**20
MOST_COPIES = 8
HEAD_DIM = {"cpu": 64, "cuda": 128}
GROUP = 4
ELEMENT = 2.0
POINT_S = 0.02


@dataclass(frozen=True)
class Roof:
    """Peak rates that efficiencies refer to."""

    flops: float
    bytes_per_s: float

    def time_s(self, flops: float, moved: float) -> float:
        """max(flops / peak, bytes / bandwidth)."""
        return max(flops / self.flops, moved / self.bytes_per_s)


def memory_rate(device: Device, budget_s: float) -> float:
    """Bytes/s of memory, read and write counted: of a large copy, or of scaling in place where that is faster.

    A copy on a CPU also reads the lines that it is about to overwrite.
    """
    count = (64 if not device.cuda else 512) * 2**20
    source = device.torch.ones(count // 4, dtype=device.torch.float32, device=device.name)
    target = device.torch.empty_like(source)
    copied = shortest_s(device, lambda: target.copy_(source), budget_s / 2)
    scaled = shortest_s(device, lambda: target.mul_(1.0), budget_s / 2)
    return 2 * count / min(copied, scaled)


def first_touch(device: Device, budget_s: float) -> dict[str, float]:
    """first_touch_s_per_gb: a fill of memory just allocated against one of memory in use, in blocks that malloc always maps afresh.

    An accelerator's allocator keeps its blocks.
    """
    if device.cuda:
        return {}
    torch, count = device.torch, 256 * 2**20
    used = torch.zeros(count // 4, dtype=torch.float32)
    fresh = shortest_s(device, lambda: torch.empty(count // 4, dtype=torch.float32).fill_(1.0), budget_s / 2)
    again = shortest_s(device, lambda: used.fill_(1.0), budget_s / 2)
    return {"first_touch_s_per_gb": max(0.0, fresh - again) / count * GB}


def host_rate(device: Device, budget_s: float) -> float:
    """Bytes/s from host memory to the device; of a copy within host memory on a CPU."""
    count = 128 * 2**20
    source = device.torch.ones(count, dtype=device.torch.uint8, pin_memory=device.cuda)
    target = device.torch.empty(count, dtype=device.torch.uint8, device=device.name)
    return count / shortest_s(device, lambda: target.copy_(source, non_blocking=True), budget_s)


def product_rate(device: Device, dtype: Any, budget_s: float) -> float:
    """Best FLOP/s of large matrix products in this dtype."""
    best = 0.0
    for size in (1024, 2048) if not device.cuda else (4096, 8192):
        a, b = device.random(size, size, dtype=dtype), device.random(size, size, dtype=dtype)
        best = max(best, 2 * size**3 / shortest_s(device, lambda a=a, b=b: a @ b, budget_s / 2))  # type: ignore[misc]
    return best


def _copies(device: Device, n: int, k: int, dtype: Any) -> Iterator[Any]:
    """Weights in turn, so that a product finds them in memory and not in a cache."""
    count = max(1, min(MOST_COPIES, int(COLD_BYTES // (ELEMENT * n * k))))
    return itertools.cycle([device.random(n, k, dtype=dtype) for _ in range(count)])


def _gemm(device: Device, roof: Roof, dtype: Any) -> Callable[[tuple[int, ...]], tuple[float, float, Any]]:
    def make(shape: tuple[int, ...]) -> tuple[float, float, Any]:
        n, k, m = shape
        flops, moved = 2.0 * m * n * k, ELEMENT * (n * k + m * k + m * n)

        def prepare() -> Callable[[], Any]:
            weights, x = _copies(device, n, k, dtype), device.random(m, k, dtype=dtype)
            return lambda: device.torch.nn.functional.linear(x, next(weights))

        return roof.time_s(flops, moved), moved, prepare

    return make


def _prefill(device: Device, roof: Roof, dtype: Any) -> Callable[[tuple[int, ...]], tuple[float, float, Any]]:
    dim = HEAD_DIM["cuda" if device.cuda else "cpu"]
    attend = device.torch.nn.functional.scaled_dot_product_attention

    def make(shape: tuple[int, ...]) -> tuple[float, float, Any]:
        heads, tokens = shape
        flops = 2.0 * heads * 2 * dim * tokens * tokens / 2

        def prepare() -> Callable[[], Any]:
            q = device.random(1, heads, tokens, dim, dtype=dtype)
            return lambda: attend(q, q, q, is_causal=True)

        return flops / roof.flops, 4 * ELEMENT * heads * tokens * dim, prepare

    return make


def _decode(device: Device, roof: Roof, dtype: Any) -> Callable[[tuple[int, ...]], tuple[float, float, Any]]:
    dim = HEAD_DIM["cuda" if device.cuda else "cpu"]
    attend = device.torch.nn.functional.scaled_dot_product_attention

    def make(shape: tuple[int, ...]) -> tuple[float, float, Any]:
        rows, context = shape  # sequences x KV heads of 128; narrower heads count as a part of one
        heads = max(1, round(rows * 128 / dim))
        moved = ELEMENT * heads * context * 2 * dim
        flops = 2.0 * heads * GROUP * context * 2 * dim

        def prepare() -> Callable[[], Any]:
            q = device.random(heads, GROUP, 1, dim, dtype=dtype)
            k = device.random(heads, 1, context, dim, dtype=dtype)
            return lambda: attend(q, k, k, enable_gqa=True)

        return roof.time_s(flops, moved), moved, prepare

    return make


MAKERS = {"gemm": _gemm, "prefill_attention": _prefill, "decode_attention": _decode}
EXPECTED_EFFICIENCY = {"gemm": 0.5, "prefill_attention": 0.1, "decode_attention": 0.1}


def measure(
    device: Device, kernel: str, roof: Roof, budget_s: float, room_bytes: float, tick: Callable[[float], None]
) -> list[Point]:
    """Points of a kernel in 16 bit, widely spread ones first, until the budget is spent. tick: share done, 0..1."""
    dtype = device.torch.bfloat16
    make, began, found = MAKERS[kernel](device, roof, dtype), time.perf_counter(), list[Point]()
    longest = budget_s / 40
    for at, shape in coarse_first(kernel):
        spent = time.perf_counter() - began
        if spent > budget_s and found:
            break
        roof_s, moved, prepare = make(shape)
        if roof_s / EXPECTED_EFFICIENCY[kernel] * 4 > longest or moved * 4 > room_bytes:
            continue
        taken = shortest_s(device, prepare(), min(POINT_S, longest / 4))
        found.append(Point(at, roof_s / taken))
        tick(min(1.0, spent / budget_s))
    return found


def room(device: Device, usable_gib: float) -> float:
    """Bytes that tensors of a point may take."""
    return min(usable_gib * GIB / 4, 2 * GIB if not device.cuda else 64 * GIB)


__all__ = ["GB", "TERA", "Roof", "host_rate", "measure", "memory_rate", "product_rate", "room"]

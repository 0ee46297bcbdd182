"""All-reduces of a serving engine inside an NVSwitch machine: measured times by GPU, ranks and message.

Data: hardware_catalog/kernels/all-reduce.csv (scripts/fit_kernels.py, from aiconfigurator-core 0.12.0: the faster of vLLM's and TensorRT-LLM's
inside CUDA graphs). vLLM's compiler runs FlashInfer's kernels, which are TensorRT-LLM's, up to a size (its fuse_allreduce_rms pass). One law for all links (collectives.py) misses them by up to two times at the messages of a decode step;
it stands where nobody measured, and carries a measurement to more ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from planner.estimator.time.collectives import Fabric, all_reduce_s, fabric
from planner.estimator.time.surfaces import FloatArray, IntArray, Surface, labelled_rows
from planner.hardware.records import Link

FILE = "all-reduce.csv"


@dataclass(frozen=True)
class SwitchReduce:
    """All-reduces of S groups. group: the groups as the law sees them; near: the same with the measured number of
    ranks; tables (U, M): log2 seconds by message; row (S,): into tables, -1 where nobody measured."""

    group: Fabric
    near: Fabric
    tables: FloatArray
    row: IntArray

    def time_s(self, message_bytes: npt.ArrayLike) -> FloatArray:
        """Seconds (S, G) of an all-reduce of `message_bytes` (S, G) or (G,): the measured time, times law(ranks) / law(measured ranks)."""
        message = np.asarray(message_bytes, dtype=float)
        law = all_reduce_s(self.group, message)
        if not np.any(self.row >= 0):
            return law
        grid = labelled_rows(FILE, 3)[0]
        at = np.log2(np.maximum(np.broadcast_to(message, law.shape), 1.0))
        place = np.clip((at - grid[0]) / (grid[1] - grid[0]), 0, len(grid) - 1)
        low = np.minimum(place.astype(np.int64), len(grid) - 2)
        lines = self.tables[np.maximum(self.row, 0)]
        left, right = np.take_along_axis(lines, low, axis=1), np.take_along_axis(lines, low + 1, axis=1)
        beyond = np.exp2(np.maximum(at - grid[-1], 0.0))  # past the last message time grows with the bytes
        more = law / np.maximum(all_reduce_s(self.near, message), 1e-12)
        seconds = np.exp2(left + (place - low) * (right - left)) * beyond * more
        return np.asarray(np.where(self.row[:, None] >= 0, seconds, law))


@cache
def _measured_ranks(surface: str, link: str) -> tuple[int, ...]:
    return tuple(sorted(int(r) for s, k, r in labelled_rows(FILE, 3)[1] if (s, k) == (surface, link)))


def _near(surface: Surface, link: Link | None, ranks: int) -> int | None:
    """The measured number of ranks that stands for `ranks`: the next larger one, else the largest; None where nobody measured."""
    if link is None or ranks <= 1 or not isinstance(surface, str):
        return None
    known = _measured_ranks(surface, link.name)
    return next((r for r in known if r >= ranks), known[-1]) if known else None


def switch_reduce(surfaces: Sequence[Surface], links: Sequence[Link | None], ranks: Sequence[int]) -> SwitchReduce:
    """The all-reduces of S groups: the kernel surface of the GPU, the link and the size of each group."""
    near = [_near(s, k, r) for s, k, r in zip(surfaces, links, ranks, strict=True)]
    points, rows = labelled_rows(FILE, 3)
    keys = [(str(s), k.name, str(n)) if n and k else None for s, k, n in zip(surfaces, links, near, strict=True)]
    place = {key: i for i, key in enumerate(dict.fromkeys(k for k in keys if k))}
    tables = np.log2(np.stack([rows[key] for key in place]) * 1e-6) if place else np.zeros((1, len(points)))
    return SwitchReduce(
        group=fabric(links, ranks),
        near=fabric(links, [n or r for n, r in zip(near, ranks, strict=True)]),
        tables=tables,
        row=np.array([place[key] if key else -1 for key in keys], dtype=np.int64),
    )

"""The grid of a kernel surface (hardware_catalog/kernels/axes.yaml): which points to time first, and what fills the rest."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from planner.estimator.time.surfaces import FloatArray, axes

NEIGHBOURS = 4


@dataclass(frozen=True)
class Point:
    """A measured point: its place in the grid and roofline time / measured time."""

    at: tuple[int, ...]
    efficiency: float


def coarse_first(kernel: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All points as (place, shape): every fourth of each axis first, then every second, then the rest."""
    grid = axes()[kernel]
    places = list(itertools.product(*(range(len(a)) for a in grid)))

    def rank(at: tuple[int, ...]) -> tuple[int, int]:
        stride = next(s for s in (4, 2, 1) if all(i % s == 0 for i in at))
        return -stride, sum(at)

    return [
        (at, tuple(round(2 ** float(a[i])) for a, i in zip(grid, at, strict=True))) for at in sorted(places, key=rank)
    ]


def filled(kernel: str, points: list[Point]) -> FloatArray:
    """Efficiency on the whole grid: as measured, else the mean of the nearest measured points.

    Mean of log2 over the NEIGHBOURS nearest, weighted by 1 / distance^2 in steps of the grid.
    """
    shape = [len(a) for a in axes()[kernel]]
    places = np.array([p.at for p in points], dtype=float)
    values = np.log2(np.array([p.efficiency for p in points]))
    table = np.empty(shape)
    for at in itertools.product(*(range(n) for n in shape)):
        far = ((places - np.array(at)) ** 2).sum(1)
        near = np.argsort(far, kind="stable")[:NEIGHBOURS]
        if far[near[0]] == 0:
            table[at] = values[near[0]]
        else:
            weight = 1 / far[near]
            table[at] = (values[near] * weight).sum() / weight.sum()
    return np.asarray(np.exp2(table))


def lines(kernel: str, dtype: str, table: FloatArray) -> list[str]:
    """The rows of a kernels/<gpu>.csv file."""
    grid = axes()[kernel]
    found = []
    for at in itertools.product(*(range(len(a)) for a in grid[:-1])):
        row = [str(round(2 ** float(a[i]))) for a, i in zip(grid[:-1], at, strict=True)]
        found.append(",".join([kernel, dtype, *row, *(f"{v:.3g}" for v in table[at])]))
    return found

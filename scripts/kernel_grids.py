"""Surfaces on log-spaced grids from scattered measurements: what fit_kernels.py does with its points.

Points: {shape: efficiency}; a shape has one number per axis. Between grid points a surface is linear in the logarithms of every axis.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

ROUNDS = 6  # of reweighting; the change of the last is under a thousandth
NEAR = 0.02  # log2: misses below this count as this, so that no point gets all the weight
PRIOR = 0.05  # weight of the nearest measured point at a grid point that no measurement reaches, in measurements


def nearest(axis: list[int], value: float) -> int:
    """Grid point nearest in log distance."""
    return min(axis, key=lambda x: abs(math.log(x) - math.log(max(value, 1e-9))))


def fill(points: dict, axes: list[list[int]]) -> np.ndarray:
    """Efficiencies on the grid; what was not measured is taken from the nearest measured point in log distance."""
    keys = np.log2(np.array(list(points), float))
    values = np.array(list(points.values()))
    grid = np.empty([len(a) for a in axes])
    for index in np.ndindex(*grid.shape):
        at = tuple(axes[d][i] for d, i in enumerate(index))
        grid[index] = points.get(at) or values[np.argmin(((keys - np.log2(np.array(at, float))) ** 2).sum(axis=1))]
    return grid


def inside(points: dict, axes: list[list[int]]) -> dict:
    """Those inside the range of the grid."""
    return {at: v for at, v in points.items() if all(a[0] <= x <= a[-1] for x, a in zip(at, axes, strict=True))}


def off_grid(points: dict, axes: list[list[int]]) -> dict:
    """Those inside the range of the grid but on none of its points."""
    within = inside(points, axes)
    return {at: v for at, v in within.items() if any(x not in a for x, a in zip(at, axes, strict=True))}


def is_held_back(at: tuple[int, ...]) -> bool:
    """One shape of five, the same ones every time."""
    return hashlib.sha256(repr(at).encode()).digest()[0] % 5 == 0


def corners(at: np.ndarray, axes: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Of P points (P, D): the flat indices of the 2^D grid points around each (P, 2^D), and their weights, which sum to one."""
    lows, fractions = [], []
    for d, axis in enumerate(axes):
        place = np.interp(np.log2(at[:, d]), np.log2(axis), np.arange(len(axis)))
        lows.append(np.minimum(place.astype(int), len(axis) - 2))
        fractions.append(place - lows[-1])
    shape, index, weight = [len(a) for a in axes], [], []
    for corner in np.ndindex(*[2] * len(axes)):
        index.append(np.ravel_multi_index([low + bit for low, bit in zip(lows, corner, strict=True)], shape))
        weight.append(np.prod([f if bit else 1 - f for f, bit in zip(fractions, corner, strict=True)], axis=0))
    return np.array(index).T, np.array(weight).T


def fitted(points: dict, axes: list[list[int]]) -> np.ndarray:
    """Grid that misses the points the least: sum of |log2 measured - log2 surface|, by least squares with weights 1 / miss.

    A grid through its own points alone would hold the best case: kernels work in tiles of 64 to 256, which powers of two fill.
    """
    at = np.array(list(points), float)
    wanted = np.log2(np.array(list(points.values())))
    index, weight = corners(at, axes)
    start = np.log2(fill(points, axes)).ravel()
    grid, count = start.copy(), start.size
    for _ in range(ROUNDS):
        miss = np.maximum(np.abs(wanted - (weight * grid[index]).sum(axis=1)), NEAR)
        rows = weight * (np.median(miss) / miss)[:, None]
        matrix, target = np.eye(count) * PRIOR, PRIOR * start
        for i in range(index.shape[1]):
            np.add.at(target, index[:, i], rows[:, i] * wanted)
            for j in range(index.shape[1]):
                np.add.at(matrix, (index[:, i], index[:, j]), rows[:, i] * weight[:, j])
        grid = np.linalg.solve(matrix, target)
    return np.minimum(np.exp2(grid.reshape([len(a) for a in axes])), 1.0)


def error(held: dict, grid: np.ndarray, axes: list[list[int]]) -> list[float]:
    """Of points held back: count, median and 90th percentile of |t_fit / t_measured - 1|."""
    if not held:
        return [0, 0.0, 0.0]
    index, weight = corners(np.array(list(held), float), axes)
    surface = np.exp2((weight * np.log2(grid).ravel()[index]).sum(axis=1))
    errors = np.abs(np.array(list(held.values())) / surface - 1)
    return [len(held), round(float(np.median(errors)), 3), round(float(np.percentile(errors, 90)), 3)]

"""Surfaces from scattered points (scripts/kernel_grids.py)."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from kernel_grids import corners, error, fill, fitted, inside, is_held_back, off_grid

AXES = [[1, 4, 16], [2, 8, 32]]


def law(x, y):
    return 0.5 * x**0.1 * y**-0.2


@pytest.fixture
def points():
    rng = np.random.default_rng(1)
    return {
        (int(x), int(y)): law(x, y) for x, y in zip(rng.integers(1, 17, 300), rng.integers(2, 33, 300), strict=True)
    }


def test_corners_give_a_point_back():
    at = np.array([[3.0, 20.0], [1.0, 2.0], [16.0, 32.0]])
    index, weight = corners(at, AXES)
    assert weight.sum(axis=1) == pytest.approx(np.ones(3))
    logs = np.log2(np.array([[x * y for y in AXES[1]] for x in AXES[0]], dtype=float)).ravel()
    assert np.exp2((weight * logs[index]).sum(axis=1)) == pytest.approx(at[:, 0] * at[:, 1])


def test_a_law_that_a_grid_can_hold_is_found(points):
    grid = fitted(points, AXES)
    expected = np.array([[law(x, y) for y in AXES[1]] for x in AXES[0]])
    assert grid == pytest.approx(expected, rel=0.01)
    assert error(points, grid, AXES)[1:] == pytest.approx([0, 0], abs=0.01)


def test_a_few_wrong_points_do_not_move_it(points):
    wrong = {at: v * (10 if i % 20 == 0 else 1) for i, (at, v) in enumerate(points.items())}
    expected = np.array([[law(x, y) for y in AXES[1]] for x in AXES[0]])
    assert fitted(wrong, AXES) == pytest.approx(expected, rel=0.05)


def test_it_is_not_the_best_case_of_its_own_points():
    steps = {(m, 2): m / (-(-m // 4) * 4) for m in range(1, 17)}  # rows in tiles of four
    grid = fitted(steps, [[1, 4, 16], [2, 8]])
    assert fill(steps, [[1, 4, 16], [2, 8]])[1:, 0] == pytest.approx([1, 1])
    assert np.all(grid[1:, 0] < 1)
    assert error(steps, grid, [[1, 4, 16], [2, 8]])[1] < 0.15


def test_never_faster_than_the_roofline(points):
    assert fitted({at: min(3 * v, 1.0) for at, v in points.items()}, AXES).max() <= 1


def test_points_held_back_are_a_fifth_and_always_the_same():
    shapes = [(n, k, m) for n in range(10) for k in range(10) for m in range(10)]
    held = [s for s in shapes if is_held_back(s)]
    assert 150 < len(held) < 250
    assert held == [s for s in shapes if is_held_back(s)]


def test_inside_and_off_the_grid():
    some = {(4, 8): 1.0, (5, 8): 1.0, (40, 8): 1.0}
    assert set(inside(some, AXES)) == {(4, 8), (5, 8)}
    assert set(off_grid(some, AXES)) == {(5, 8)}
    assert error({}, np.ones((3, 3)), AXES) == [0, 0.0, 0.0]

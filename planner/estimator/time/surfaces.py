"""Measured efficiency of kernels by shape: roofline time / measured time, on log-spaced grids, one file per GPU, and two for
the grouped matrix products of experts, by whose kernels they are (vLLM, SGLang, TensorRT-LLM): any shape, and the very shapes that were measured.

Data: hardware_catalog/kernels/<surface>.csv with axes.yaml, borrow.yaml and fit_error.yaml (held-back error of each surface),
made by scripts/fit_kernels.py from aiconfigurator-core 0.12.0 (Apache-2.0). A GPU without a file borrows the surface of the
nearest relative (borrow.yaml); its own peak and bandwidth set the roofline, so only the shape of the curve is borrowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.errors import CatalogError
from planner.hardware.records import Gpu, KernelFile

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Surface = str | KernelFile
"""A packaged surface by name, or one's own."""


def read_data(package: str, name: str) -> Any:
    """A YAML data file of a package, loaded safely."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(files(package).joinpath(name).read_text("utf-8"), loader)  # noqa: S506 (safe loader)


@cache
def read_kernel_data(name: str) -> Any:
    """A YAML file beside the kernel surfaces, read once."""
    return read_data("hardware_catalog.kernels", name)


@cache
def axes() -> dict[str, list[FloatArray]]:
    """Log2 of the grid of each kernel, by axis."""
    raw = read_kernel_data("axes.yaml")
    return {kernel: [np.log2(np.array(a, dtype=float)) for a in axis.values()] for kernel, axis in raw.items()}


def _label_of(surface: Surface) -> str:
    """How errors name the file."""
    return surface.label if isinstance(surface, KernelFile) else f"kernels/{surface}.csv"


LENT = "experts,borrowed,"
"""The line of one's own file that names the packaged surface whose experts stand in: they are not measured there."""


def _lender(surface: KernelFile) -> str:
    """The packaged surface that lends the grouped products of experts to one's own file."""
    found = next((line.removeprefix(LENT).strip() for line in surface.text.splitlines() if line.startswith(LENT)), None)
    measured = set(read_kernel_data("borrow.yaml")["measured"].values())
    if found not in measured:
        raise CatalogError(
            f"{surface.label} names no surface for experts",
            f"add the line {LENT}NAME",
            f"Known: {', '.join(sorted(measured))}.",
        )
    return str(found)


@cache
def _tables(surface: Surface) -> dict[tuple[str, str], FloatArray]:
    """Log2 efficiency of one file by (kernel, dtype)."""
    if isinstance(surface, KernelFile):
        text = surface.text
    else:
        text = files("hardware_catalog.kernels").joinpath(f"{surface}.csv").read_text("utf-8")
    lines: dict[tuple[str, str], list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(("#", LENT)):
            kernel, dtype, rest = ([*line.split(",", 2), "", ""])[:3]
            if kernel not in axes() or not rest:
                raise CatalogError(
                    f"{_label_of(surface)}: {line[:60]!r} is no row of a kernel", f"known: {', '.join(axes())}"
                )
            lines.setdefault((kernel, dtype), []).append(rest.split(",", len(axes()[kernel]) - 1)[-1])
    return {key: _table(_label_of(surface), key, rows) for key, rows in lines.items()}


def _table(label: str, key: tuple[str, str], rows: list[str]) -> FloatArray:
    """Log2 efficiency on the grid of a kernel from the values of its lines."""
    shape = [len(a) for a in axes()[key[0]]]
    try:
        values = np.array(",".join(rows).split(","), dtype=float)
    except ValueError:
        raise CatalogError(f"{label}: {' '.join(key)} has a value that is no number", "") from None
    if values.size != np.prod(shape):
        raise CatalogError(
            f"{label}: {' '.join(key)} has {values.size} values",
            f"the grid of this version needs {np.prod(shape)}",
            "Make the file again (planner calibrate).",
        )
    if not np.all(np.isfinite(values)) or values.min() <= 0:
        raise CatalogError(f"{label}: {' '.join(key)} has an efficiency that is not above 0", "")
    return np.asarray(np.log2(values.reshape(shape)))


@dataclass(frozen=True)
class SurfaceChoice:
    """Which measured surface stands for a GPU. borrowed: measured on another GPU."""

    surface: Surface
    borrowed: bool


@cache
def surface_of(gpu: Gpu) -> SurfaceChoice:
    """The surface of a GPU: its own, or the one of the nearest relative (borrow.yaml)."""
    if gpu.kernels is not None:
        return SurfaceChoice(gpu.kernels, False)
    table = read_kernel_data("borrow.yaml")
    if gpu.name in table["measured"]:
        return SurfaceChoice(table["measured"][gpu.name], False)
    relative = table["by_compute_capability"].get(gpu.compute_capability) if gpu.vendor == "nvidia" else None
    return SurfaceChoice(relative or table["by_vendor"][gpu.vendor], True)


def table_of(surface: Surface, kernel: str, dtype: str) -> FloatArray:
    """Log2 efficiency on the grid of `kernel`; a dtype the GPU was not measured in takes the nearest measured one."""
    if kernel.startswith("moe_"):
        surface = f"{_lender(surface) if isinstance(surface, KernelFile) else surface}-experts"
    if kernel.startswith("decode_attention_") and isinstance(surface, KernelFile):
        kernel = "decode_attention"  # one's own was measured with the one engine it has
    found = _tables(surface)
    order = read_dtype_order()[dtype]
    for candidate in order:
        if (kernel, candidate) in found:
            return found[kernel, candidate]
    raise CatalogError(f"{_label_of(surface)} has no {kernel} surface for {dtype}", f"looked for {', '.join(order)}")


@cache
def labelled_rows(name: str, labels: int) -> tuple[FloatArray, dict[tuple[str, ...], FloatArray]]:
    """A packaged CSV file of curves: log2 of the points (behind the labels of its header) and the values of each row by its labels."""
    lines = files("hardware_catalog.kernels").joinpath(name).read_text("utf-8").splitlines()
    rows = [line.split(",") for line in lines if line and not line.startswith("#")]
    points = np.log2(np.array(rows[0][labels:], dtype=float))
    return points, {tuple(row[:labels]): np.array(row[labels:], dtype=float) for row in rows[1:]}


@dataclass(frozen=True)
class ExpertCurve:
    """Log2 efficiency of experts of one measured shape over log2 tokens."""

    tokens: FloatArray
    efficiency: FloatArray


@cache
def expert_curve(surface: Surface, family: str, dtype: str, shape: tuple[int, int, int, int]) -> ExpertCurve | None:
    """Experts of this very shape (hidden, width on a rank, top, experts) by a family of kernels; None where it was not measured."""
    if isinstance(surface, KernelFile):
        return None
    tokens, rows = labelled_rows(f"{surface}-expert-shapes.csv", 6)
    found = rows.get((family, read_dtype_order()[dtype][0], *map(str, shape)))
    return None if found is None else ExpertCurve(tokens, np.log2(found))


@cache
def read_dtype_order() -> dict[str, list[str]]:
    """For each compute dtype the surfaces to look for, nearest first."""
    order: dict[str, list[str]] = read_kernel_data("borrow.yaml")["dtypes"]
    return order


@dataclass(frozen=True)
class Stack:
    """Tables of one kernel for many shards: `tables` (U, ...grid) and `index` (S,) into it; the dtype of each shard's table."""

    kernel: str
    tables: FloatArray
    index: IntArray
    dtypes: tuple[str, ...]

    @classmethod
    def build(cls, kernel: str, keys: list[tuple[Surface, str]]) -> Stack:
        """Stack the tables of (surface, dtype) keys, one key per shard."""
        unique = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        tables = np.stack([table_of(surface, kernel, dtype) for surface, dtype in unique])
        return cls(
            kernel, tables, np.array([unique[k] for k in keys], dtype=np.int64), tuple(dtype for _, dtype in keys)
        )

    def efficiency(self, *shape: npt.ArrayLike) -> FloatArray:
        """Efficiency (S, G) at a shape per axis: row axes (S,), last axis (S, G) or (G,). Clamped at the edges of the grid.

        Interpolates log2(efficiency) linearly in log2 of every axis.
        """
        grid = axes()[self.kernel]
        positions = [
            np.interp(np.log2(np.maximum(np.asarray(x, dtype=float), 1e-9)), a, np.arange(len(a)))
            for x, a in zip(shape, grid, strict=True)
        ]
        rows = np.zeros((1, 1))
        count = len(grid) - 1
        lows = [np.minimum(p.astype(np.int64), len(a) - 2) for p, a in zip(positions, grid, strict=True)]
        fractions = [p - low for p, low in zip(positions, lows, strict=True)]
        if all(p.ndim <= 1 for p in positions[:-1]):  # row axes fixed per shard: gather whole lines once
            for corner in range(2**count):
                bits = [(corner >> d) & 1 for d in range(count)]
                where = tuple(lows[d] + bits[d] for d in range(count))
                weight = np.ones(self.index.shape)
                for d in range(count):
                    weight = weight * (fractions[d] if bits[d] else 1 - fractions[d])
                rows = rows + weight[:, None] * self.tables[(self.index, *where)]
            last, fraction = np.broadcast_to(lows[-1], (len(self.index), lows[-1].shape[-1])), fractions[-1]
            low = np.take_along_axis(rows, last, axis=1)
            high = np.take_along_axis(rows, last + 1, axis=1)
            return np.asarray(np.exp2(low + fraction * (high - low)))
        total = np.zeros(np.broadcast_shapes(*(p.shape for p in positions), (len(self.index), 1)))
        for corner in range(2 ** len(grid)):
            weight_all: Any = 1.0
            where_all = []
            for d in range(len(grid)):
                bit = (corner >> d) & 1
                weight_all = weight_all * (fractions[d] if bit else 1 - fractions[d])
                where_all.append(lows[d] + bit)
            total = total + weight_all * self.tables[(self.index[:, None], *where_all)]
        return np.asarray(np.exp2(total))

"""Many training layouts at once: equal-length columns, one entry per candidate. The estimators take and gather them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Split = tuple[int, ...]


@dataclass(frozen=True)
class TrainRows:
    """Equal-length int arrays. framework: index into the list of frameworks given beside; offload: index into OFFLOADS.

    zero_stage 0..3 (fsdp2, torchtitan: 3 = full shard, 2 = weights stay gathered between forward and backward).
    checkpoint_interval: 0 = none, k = one checkpoint every k layers. world = tensor * pipeline * context * data ranks;
    expert_parallel divides tensor * context * data. split: how the layers are cut into pipeline stages, 0 = as
    planner.estimator.train_stages.split_layers does, k = splits[k - 1].
    """

    framework: IntArray
    tensor_parallel: IntArray
    pipeline_parallel: IntArray
    context_parallel: IntArray
    data_parallel: IntArray
    expert_parallel: IntArray
    zero_stage: IntArray
    micro_batch_size: IntArray
    gradient_accumulation_steps: IntArray
    checkpoint_interval: IntArray
    offload: IntArray
    split: IntArray
    splits: tuple[Split, ...] = field(default=(), kw_only=True)

    def __len__(self) -> int:
        return len(self.framework)

    @property
    def world(self) -> IntArray:
        """GPUs of each row."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    def columns(self) -> tuple[IntArray, ...]:
        """The columns in the order of the fields."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.name != "splits")

    def take(self, index: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> TrainRows:
        """The rows at `index` (positions or a mask)."""
        return TrainRows(*(c[index] for c in self.columns()), splits=self.splits)

    def cut(self, splits: tuple[Split, ...], index: npt.NDArray[np.int64]) -> TrainRows:
        """The same rows with row i cut as splits[index[i]]."""
        return replace(self, split=index + 1, splits=splits)

    @classmethod
    def join(cls, parts: Sequence[TrainRows]) -> TrainRows:
        """All rows of the parts, in order, over one table of splits."""
        shifts = np.cumsum([0, *(len(p.splits) for p in parts)])
        moved = [
            (*p.columns()[:-1], np.where(p.split > 0, p.split + s, 0)) for p, s in zip(parts, shifts, strict=False)
        ]
        columns = [np.concatenate(same) for same in zip(*moved, strict=True)]
        return cls(*columns, splits=tuple(split for p in parts for split in p.splits))

    @classmethod
    def of(cls, rows: Iterable[Iterable[int]]) -> TrainRows:
        """Rows from tuples in the order of the fields; the split may be left out."""
        wide = [[*r] for r in rows]
        columns = len(fields(cls)) - 1
        table = np.array([r + [0] * (columns - len(r)) for r in wide], dtype=np.int64).reshape(-1, columns)
        return cls(*(np.ascontiguousarray(table[:, i]) for i in range(columns)))


def compact(*columns: IntArray) -> tuple[tuple[IntArray, ...], IntArray]:
    """Distinct combinations of the columns, and for every row the number of its combination.

    Works by dense codes (no sort) while they stay few, so that millions of rows cost milliseconds.
    """
    size = len(columns[0])
    code, width = np.zeros(size, dtype=np.int64), 1
    values = []
    for column in columns:
        low, high = (int(column.min()), int(column.max())) if size else (0, 0)
        if high - low < 1 << 20:
            seen = np.zeros(high - low + 1, dtype=bool)
            seen[column - low] = True
            distinct = np.flatnonzero(seen) + low
            place = np.cumsum(seen) - 1
            index = place[column - low]
        else:
            distinct, index = np.unique(column, return_inverse=True)
        values.append(distinct)
        code = code * len(distinct) + index
        width *= len(distinct)
    if width <= 1 << 24:
        used = np.zeros(width, dtype=bool)
        used[code] = True
        kept, inverse = np.flatnonzero(used), (np.cumsum(used) - 1)[code]
    else:
        kept, inverse = np.unique(code, return_inverse=True)
    found: list[IntArray] = []
    for distinct in reversed(values):
        found.append(distinct[kept % len(distinct)])
        kept = kept // len(distinct)
    return tuple(reversed(found)), np.asarray(inverse, dtype=np.int64)

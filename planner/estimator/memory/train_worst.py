"""The worst moment of a training step: how much is there, and what of it are gradients, activations and logits."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from planner.space.train_rows import IntArray

FloatArray = npt.NDArray[np.float64]
LOAD, BACKWARD, STEP = 0, 1, 2


@dataclass(frozen=True)
class Worst:
    """The worst moment of each row: bytes of all tensors, what a CPU process holds above them at the step, which moment, the number of
    the worst stage, and the gradients, activations and logits that are there."""

    tensors: FloatArray
    heap: FloatArray
    moment: FloatArray
    stage: IntArray
    gradients: FloatArray
    activations: FloatArray
    logits: FloatArray

    def where(self, worse: npt.NDArray[np.bool_], other: Worst) -> Worst:
        """The other's values where that is worse."""
        return Worst(*(np.where(worse, getattr(other, f.name), getattr(self, f.name)) for f in fields(Worst)))


def there(
    moment: IntArray,
    times: tuple[FloatArray, FloatArray],
    first: tuple[FloatArray, FloatArray],
    gradients: tuple[FloatArray, FloatArray],
    kept: tuple[FloatArray, FloatArray],
    logits: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Gradients, activations and logits that are there at the worst moment.

    times: (when backward begins, when it ends); first: (logits, layers at work) of its beginning; gradients: (held before, after);
    kept: activations (that wait, at work). While loading there are none of them, at the step there are gradients.
    """
    begins, backward = times[0] >= times[1], moment == BACKWARD
    at_logits = begins & (first[0] > first[1])
    held = np.where(backward & begins, gradients[0], np.where(moment == LOAD, 0.0, gradients[1]))
    activations = np.where(begins, kept[0], 0.0) + np.where(at_logits, 0.0, kept[1])
    return held, np.where(backward, activations, 0.0), np.where(backward & at_logits, np.minimum(logits, first[0]), 0.0)

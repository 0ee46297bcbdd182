"""How much load the limits of an infeasible request would allow."""

from __future__ import annotations

import math
from dataclasses import replace

from planner.hardware.records import Catalog
from planner.models.spec import ModelSpec
from planner.request import ServeRequest, Workload

STEPS = 12
LEAST_FRACTION = 1e-3


def highest_load(request: ServeRequest, model: ModelSpec, catalog: Catalog) -> float | None:
    """The highest rate (to about 2%) or number of users that is feasible under all limits; None when none is.

    Feasibility is monotone in the load (property test), so bisection over the closed-form ranking finds it.
    """
    from planner.solver.ranking import rank
    from planner.solver.study import make_study

    w = request.workload

    def feasible(load: float) -> bool:
        workload = (
            Workload(w.input_tokens, w.output_tokens, None, int(load))
            if w.concurrency is not None
            else Workload(w.input_tokens, w.output_tokens, load, None)
        )
        study = make_study(replace(request, workload=workload), model, catalog)
        return bool(len(study.problem.rows)) and bool((rank(study.problem).broken_count == 0).any())

    if w.concurrency is not None:
        low, high = 1, w.concurrency
        if high <= 1 or not feasible(low):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if feasible(middle) else (low, middle)
        return float(low)
    top = w.rate_per_s or 0.0
    bottom = top * LEAST_FRACTION
    if not feasible(bottom):
        return None
    for _ in range(STEPS):
        middle = (top * bottom) ** 0.5
        bottom, top = (middle, top) if feasible(middle) else (bottom, middle)
        if top / bottom < 1.02:
            break
    digits = 10.0 ** (math.floor(math.log10(bottom)) - 2)
    return round(math.floor(bottom / digits) * digits, 9)

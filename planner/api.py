"""The Python API: solve, compare, estimate. Each takes a request (or its keyword arguments) and returns frozen records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.request import ServeRequest, TrainRequest

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.solver.compare import Choice
    from planner.solver.single import Estimate, MemoryReport


def solve(request: ServeRequest | TrainRequest) -> Plan:
    """The best deployment or training run for the request, with its proof; status 'infeasible' with an explanation when there is none.

    Raises InputError for what cannot be read (unknown names, impossible pins, broken catalog files).
    """
    from planner.hardware.catalog import load_catalog
    from planner.models import load_model

    catalog, model = load_catalog(request.hardware.catalog_dirs), load_model(request.model)
    if isinstance(request, TrainRequest):
        from planner.solver.training import solve_training

        return solve_training(request, model, catalog)
    from planner.solver.serving import solve_serving

    return solve_serving(request, model, catalog)


def compare(request: ServeRequest, *, near_misses: bool = False) -> list[Choice]:
    """The best configuration on every instance type that keeps the limits, best first by the goal."""
    from planner.hardware.catalog import load_catalog
    from planner.models import load_model
    from planner.solver.compare import compare_serving

    catalog = load_catalog(request.hardware.catalog_dirs)
    return compare_serving(request, load_model(request.model), catalog, near_misses=near_misses)


def estimate(request: ServeRequest) -> Estimate:
    """All predictions for one configuration: pin its axes in request.pins, its hardware in request.hardware."""
    from planner.hardware.catalog import load_catalog
    from planner.models import load_model
    from planner.solver.single import estimate_serving

    catalog = load_catalog(request.hardware.catalog_dirs)
    return estimate_serving(request, load_model(request.model), catalog)


def memory(request: ServeRequest) -> MemoryReport:
    """The memory of one configuration, part by part: pin its axes in request.pins, its hardware in request.hardware."""
    from planner.hardware.catalog import load_catalog
    from planner.models import load_model
    from planner.solver.single import memory_serving

    catalog = load_catalog(request.hardware.catalog_dirs)
    return memory_serving(request, load_model(request.model), catalog)

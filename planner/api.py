"""The Python API: solve, compare, estimate. Each takes a request (or its keyword arguments) and returns frozen records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.request import ServeRequest, TrainRequest

if TYPE_CHECKING:
    from planner.hardware.records import Catalog
    from planner.models.spec import ModelSpec
    from planner.plan import Plan
    from planner.solver.compare import Choice
    from planner.solver.single import Estimate, MemoryReport


def solve(request: ServeRequest | TrainRequest) -> Plan:
    """The best deployment or training run for the request, with its proof; status 'infeasible' with an explanation when there is none.

    Raises InputError for what cannot be read (unknown names, impossible pins, broken catalog files).
    """
    catalog, model = _load(request)
    if isinstance(request, TrainRequest):
        from planner.solver.training import solve_training

        return solve_training(request, model, catalog)
    from planner.solver.serving import solve_serving

    return solve_serving(request, model, catalog)


def compare(request: ServeRequest | TrainRequest, *, near_misses: bool = False) -> list[Choice]:
    """The best configuration on every instance type that keeps the limits, best first by the goal."""
    catalog, model = _load(request)
    if isinstance(request, TrainRequest):
        from planner.solver.train_single import compare_training

        return compare_training(request, model, catalog, near_misses=near_misses)
    from planner.solver.compare import compare_serving

    return compare_serving(request, model, catalog, near_misses=near_misses)


def estimate(request: ServeRequest | TrainRequest) -> Estimate:
    """All predictions for one configuration: pin its axes in request.pins, its hardware in request.hardware."""
    catalog, model = _load(request)
    if isinstance(request, TrainRequest):
        from planner.solver.train_single import estimate_training

        return estimate_training(request, model, catalog)
    from planner.solver.single import estimate_serving

    return estimate_serving(request, model, catalog)


def memory(request: ServeRequest | TrainRequest) -> MemoryReport:
    """The memory of one configuration, part by part: pin its axes in request.pins, its hardware in request.hardware."""
    catalog, model = _load(request)
    if isinstance(request, TrainRequest):
        from planner.solver.train_single import memory_training

        return memory_training(request, model, catalog)
    from planner.solver.single import memory_serving

    return memory_serving(request, model, catalog)


def _load(request: ServeRequest | TrainRequest) -> tuple[Catalog, ModelSpec]:
    """Catalog and model of a request."""
    from planner.hardware.catalog import load_catalog
    from planner.models import load_model

    return load_catalog(request.hardware.catalog_dirs), load_model(request.model)

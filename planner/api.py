"""The Python API: solve, compare, estimate. Each takes a request (or its keyword arguments) and returns frozen records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.request import ServeRequest, TrainRequest, check_type

if TYPE_CHECKING:
    from pathlib import Path

    from planner.hardware.records import Catalog
    from planner.models.spec import ModelSpec
    from planner.plan import Deployment, Plan
    from planner.solver.compare import Choice
    from planner.solver.single import Estimate, MemoryReport


def solve(
    request: ServeRequest | TrainRequest,
    *,
    excluded: Sequence[Deployment] = (),
    calibration: Sequence[str | Path] = (),
) -> Plan:
    """The best deployment or training run for the request, with its proof; status 'infeasible' with an explanation when there is none.

    excluded: deployments of earlier answers that may not come again, nor what puts more on the same GPU.
    calibration: validated plans whose measurements correct predictions of their own class (docs/validate.md).

    Raises InputError for what cannot be read (unknown names, impossible pins, broken catalog files).
    """
    from planner.plan import Deployment
    from planner.plan_seal import sealed

    check_type(excluded, (list, tuple), "excluded", "Write for example excluded=[plan.deployment].")
    for deployment in excluded:
        check_type(deployment, (Deployment,), "an entry of excluded", "Give deployments of earlier plans.")
    catalog, model = _load(request, calibration)
    if isinstance(request, TrainRequest):
        from planner.solver.training import solve_training

        return sealed(solve_training(request, model, catalog, excluded))
    from planner.solver.serving import solve_serving

    return sealed(solve_serving(request, model, catalog, excluded))


def compare(
    request: ServeRequest | TrainRequest, *, near_misses: bool = False, calibration: Sequence[str | Path] = ()
) -> list[Choice]:
    """The best configuration on every instance type that keeps the limits, best first by the goal. calibration: as solve."""
    catalog, model = _load(request, calibration)
    if isinstance(request, TrainRequest):
        from planner.solver.train_single import compare_training

        return _marked(compare_training(request, model, catalog, near_misses=near_misses), catalog)
    from planner.solver.compare import compare_serving

    return _marked(compare_serving(request, model, catalog, near_misses=near_misses), catalog)


def _marked(choices: list[Choice], catalog: Catalog) -> list[Choice]:
    """The choices; a note says of which the predictions were corrected by the calibration files."""
    if not catalog.calibration:
        return choices
    from dataclasses import replace

    from planner.estimator.corrections import CORRECTED, applied_to

    return [
        replace(c, note="; ".join(filter(None, (c.note, CORRECTED)))) if applied_to(catalog, c.deployment) else c
        for c in choices
    ]


def estimate(request: ServeRequest | TrainRequest, *, calibration: Sequence[str | Path] = ()) -> Estimate:
    """All predictions for one configuration: pin its axes in request.pins, its hardware in request.hardware."""
    catalog, model = _load(request, calibration)
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


def _load(request: ServeRequest | TrainRequest, calibration: Sequence[str | Path] = ()) -> tuple[Catalog, ModelSpec]:
    """Catalog and model of a request; the catalog carries the corrections of the calibration files."""
    from planner.hardware.catalog import load_catalog
    from planner.models import load_model

    check_type(request, (ServeRequest, TrainRequest), "request", "Write for example solve(ServeRequest(model='8b')).")
    _check_files(calibration)
    catalog = load_catalog(request.hardware.catalog_dirs)
    if request.hardware.catalog_dirs:
        _check_own(catalog)
    if calibration:
        from planner.estimator.corrections import corrected
        from planner.plan import load_plan
        from planner.solver.measured_point import measured_factors

        catalog = corrected(catalog, [(str(file), load_plan(file)) for file in calibration], measured_factors)
    return catalog, load_model(request.model)


def _check_files(calibration: Sequence[str | Path]) -> None:
    """InvalidValueError for a single path, or for what is no path, in place of a list of them."""
    from pathlib import Path

    check_type(calibration, (list, tuple), "calibration", "Write for example calibration=['measured.yaml'].")
    for file in calibration:
        check_type(file, (str, Path), "a file of calibration", "Give paths of validated plans.")


def _check_own(catalog: Catalog) -> None:
    """Faults that the user's folders brought in stop the request; those of the packaged catalog do not."""
    from planner.clock import today
    from planner.errors import CatalogError
    from planner.hardware.catalog import load_catalog
    from planner.hardware.check import check_catalog

    known = set(check_catalog(load_catalog(), today()).faults)
    own = [fault for fault in check_catalog(catalog, today()).faults if fault not in known]
    if own:
        more = f" (and {len(own) - 1} more: planner catalog check)" if len(own) > 1 else ""
        raise CatalogError("--catalog has a fault", f"{own[0]}{more}", "Correct the file.")

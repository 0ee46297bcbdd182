"""The device that a plan was made for, from the catalog that it was made with."""

from __future__ import annotations

from planner.errors import UnknownNameError
from planner.hardware.catalog import load_catalog
from planner.hardware.records import Catalog, Gpu
from planner.plan import Deployment, Plan


def planned_gpu(plan: Plan, dep: Deployment) -> tuple[Gpu, Catalog]:
    """The GPU (or CPU device) of the plan and its catalog. UnknownNameError when the catalog has no such GPU any more."""
    catalog = load_catalog(dict(plan.request.get("hardware") or {}).get("catalog_dirs") or ())
    name = dep.offers[0].gpu
    if name not in catalog.gpus:
        raise UnknownNameError("GPU", name, catalog.gpus, "Is the folder of --catalog still there?")
    return catalog.gpus[name], catalog

"""planner: which hardware, how many, configured how, for serving or training a large language model.

The whole public surface is declared here; everything else may change. Heavy modules load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.api import compare, estimate, memory, solve
    from planner.errors import InputError, NoPlanError, PlannerError
    from planner.plan import Plan, load_plan
    from planner.request import (
        HardwareFilter,
        Limits,
        Pins,
        ServeRequest,
        TrainJob,
        TrainLimits,
        TrainPins,
        TrainRequest,
        Workload,
    )

__version__ = "0.1.0"

_HOMES = {
    "solve": "planner.api",
    "compare": "planner.api",
    "estimate": "planner.api",
    "memory": "planner.api",
    "Plan": "planner.plan",
    "load_plan": "planner.plan",
    "ServeRequest": "planner.request",
    "Workload": "planner.request",
    "Limits": "planner.request",
    "HardwareFilter": "planner.request",
    "Pins": "planner.request",
    "TrainRequest": "planner.request",
    "TrainJob": "planner.request",
    "TrainLimits": "planner.request",
    "TrainPins": "planner.request",
    "PlannerError": "planner.errors",
    "InputError": "planner.errors",
    "NoPlanError": "planner.errors",
}

__all__ = [
    "HardwareFilter",
    "InputError",
    "Limits",
    "NoPlanError",
    "Pins",
    "Plan",
    "PlannerError",
    "ServeRequest",
    "TrainJob",
    "TrainLimits",
    "TrainPins",
    "TrainRequest",
    "Workload",
    "compare",
    "estimate",
    "load_plan",
    "memory",
    "solve",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)

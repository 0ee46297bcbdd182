"""Which deployment the figures of a plan are of: a digest, made when it was solved, that an edit by hand does not keep."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from planner.plan import Plan, plan_to_dict

EDITED = "the plan was edited after it was solved: its predictions are of the deployment before"
_LOAD = ("workload", "job")


def figures_digest(plan: Plan) -> str:
    """SHA-256 (its first 16 digits) of deployment, model and load, and of the figures that were estimated for them."""
    tree = plan_to_dict(plan)
    parts = {name: tree[name] for name in ("model", "deployment", "memory", "predicted", "cost")}
    parts["load"] = {name: plan.request.get(name) for name in _LOAD}
    return hashlib.sha256(json.dumps(_plain(parts), sort_keys=True).encode("utf-8")).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Numbers as floats: a file may hold 0 for 0.0."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def sealed(plan: Plan) -> Plan:
    """The plan with the digest of its figures; an infeasible one has none."""
    if plan.deployment is None:
        return plan
    return replace(plan, provenance=replace(plan.provenance, figures_of=figures_digest(plan)))


def as_solved(plan: Plan) -> bool:
    """True when the figures are of this very deployment and load."""
    return plan.provenance.figures_of == figures_digest(plan)


def was_edited(plan: Plan) -> bool:
    """True when the plan says what its figures are of, and that is not this deployment and load."""
    return bool(plan.provenance.figures_of) and not as_solved(plan)


def edit_notes(plan: Plan) -> tuple[str, ...]:
    """What must be known by who compares a plan with what was counted or measured: () unless it was edited."""
    return (f"{EDITED[0].upper()}{EDITED[1:]}.",) if was_edited(plan) else ()

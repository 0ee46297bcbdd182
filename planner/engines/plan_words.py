"""How a value of a plan file that cannot be is said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from planner.errors import PlanFileError, UnknownNameError
from planner.plan import Deployment

MEND = "Solve again, or mend that field."


def wrong(what: str, why: str, next_step: str = MEND) -> PlanFileError:
    """An error in the words of a plan file."""
    return PlanFileError(what, why, next_step)


def known(field: str, value: Any, names: Iterable[str]) -> None:
    """UnknownNameError, with the nearest names, for a value that is none of them."""
    if value not in (pool := tuple(names)):
        raise UnknownNameError(f"{field} of the plan", str(value), pool, MEND)


def check_version(dep: Deployment, versions: Mapping[str, str]) -> None:
    """The version of the plan is not that of another engine or framework, left there when the name was edited. versions: by name."""
    own = versions[dep.engine]
    others = [name for name, version in versions.items() if version == dep.engine_version != own]
    if others:
        raise wrong(
            f"deployment.engine_version of the plan is {dep.engine_version}",
            f"that is the version of {others[0]}; {dep.engine} is known as {own}",
        )

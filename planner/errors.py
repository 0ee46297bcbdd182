"""One tree of errors. Each says what is wrong, why, and the next step, in one line a person can act on.

PlannerError                 exit code 1: a fault of ours
|- InputError                exit code 2: what was asked cannot be read
|  |- UnknownNameError       a name nobody knows, with the nearest known ones
|  |- InvalidValueError      a value out of range, without a unit, or not a number
|  |- ModelConfigError       a config.json that cannot be turned into a model
|  |- CatalogError           a catalog file that is broken
|  |- PlanFileError          a plan file that cannot be read back
|  |- MissingExtraError      a package of an optional extra is not installed
|  |- UnreachableError       the network was needed and could not be reached
|  `- EngineFailedError      an engine that we started died, hung or could not be started
`- NoPlanError               exit code 3: no plan exists; carries the explanation
"""

from __future__ import annotations

from collections.abc import Iterable

EXIT_OK, EXIT_FAULT, EXIT_BAD_INPUT, EXIT_NO_PLAN = 0, 1, 2, 3


class PlannerError(Exception):
    """Base of all errors of the planner.

    Args: what went wrong; why (may be empty); next_step a person can take (may be empty).
    """

    exit_code = EXIT_FAULT

    def __init__(self, what: str, why: str = "", next_step: str = "") -> None:
        self.what, self.why, self.next_step = what, why, next_step
        super().__init__(str(self))

    def __str__(self) -> str:
        text = self.what if not self.why else f"{self.what}: {self.why}"
        if self.next_step:
            text = f"{text.rstrip('.')}. {self.next_step}"
        return " ".join(text.split())


class InputError(PlannerError):
    """What was asked cannot be read or makes no sense."""

    exit_code = EXIT_BAD_INPUT


class UnknownNameError(InputError):
    """A name that nobody knows. `known` are the names to suggest from."""

    def __init__(self, kind: str, name: str, known: Iterable[str], next_step: str = "") -> None:
        import difflib

        shown = name if len(name) <= 80 else name[:77] + "..."
        pool = sorted(set(known))
        lowered = {k.lower(): k for k in pool}
        near = [lowered[n] for n in difflib.get_close_matches(name.lower()[:200], list(lowered), n=3, cutoff=0.5)]
        near = near or [k for k in pool if name.lower() in k.lower()][:3]
        hint = (
            f"Nearest known: {', '.join(near)}"
            if near
            else f"Known: {', '.join(pool[:8])}{', ...' if len(pool) > 8 else ''}"
        )
        self.kind, self.name, self.suggestions = kind, name, tuple(near)
        super().__init__(
            f"unknown {kind} {shown!r}", "", " ".join(p for p in (f"{hint}." if pool else "", next_step) if p)
        )


class InvalidValueError(InputError):
    """A value out of range, without its unit, or not a number."""


class ModelConfigError(InputError):
    """A config.json or model folder that cannot be turned into a model."""


class CatalogError(InputError):
    """A file of the hardware catalog is broken; names file and field."""


class PlanFileError(InputError):
    """A plan file cannot be read back."""


class MissingExtraError(InputError):
    """A package of an optional extra is needed and not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.command = f"pip install '.[{extra}]'"
        super().__init__(
            f"{purpose} needs the package {package!r}",
            "it is not installed",
            f"Install it in the project's folder: {self.command}",
        )


class UnreachableError(InputError):
    """The network was needed and could not be reached."""


class EngineFailedError(InputError):
    """An engine that we started died, hung or could not be started; says what its log means.

    last_lines: the end of its log, shown below the message.
    """

    last_lines: tuple[str, ...] = ()


class NoPlanError(PlannerError):
    """No plan exists for the request; the message explains what clashes."""

    exit_code = EXIT_NO_PLAN

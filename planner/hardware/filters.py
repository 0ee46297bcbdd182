"""Which offers a request may use: one pure predicate, and the checked selection built on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from planner.errors import InvalidValueError, UnknownNameError
from planner.hardware.names import find_gpu
from planner.hardware.owned import owned_offers
from planner.hardware.records import Catalog, Offer
from planner.request import TIERS, HardwareFilter

_FIELDS = {
    "providers": "provider",
    "regions": "region",
    "gpus": "GPU",
    "instance_types": "instance type",
    "tiers": "tier",
}


def matches(offer: Offer, wanted: HardwareFilter, catalog: Catalog) -> bool:
    """True when the offer passes every filter that is set; case is ignored, '*' and '?' are wildcards."""
    return _passes(offer, _canonical(wanted, catalog))


def matching_offers(catalog: Catalog, wanted: HardwareFilter) -> tuple[Offer, ...]:
    """All offers that pass `wanted`; with wanted.owned the owned machines and nothing else.

    Errors: UnknownNameError for a provider, region, GPU, instance type or tier that no offer has; InvalidValueError
    when each is known and no offer has them together.
    """
    if wanted.owned:
        return owned_offers(wanted.owned, wanted.fabric_gbps, catalog)
    exact = _canonical(wanted, catalog)
    for field in _FIELDS:
        _check_known(field, getattr(exact, field), catalog)
    found = tuple(o for o in catalog.offers if _passes(o, exact))
    if not found:
        raise InvalidValueError(
            "no offer passes the filters",
            _clash(catalog, exact),
            "Drop one of them; `planner catalog list` shows what there is.",
        )
    return found


def _canonical(wanted: HardwareFilter, catalog: Catalog) -> HardwareFilter:
    """The same filter in lower case, GPUs by their catalog names (patterns stay patterns)."""
    gpus = tuple(g.lower() if _is_pattern(g) else find_gpu(g, catalog).name for g in wanted.gpus)
    lowered: dict[str, Any] = {f: tuple(v.lower() for v in getattr(wanted, f)) for f in _FIELDS if f != "gpus"}
    return replace(wanted, gpus=gpus, **lowered)


def _is_pattern(text: str) -> bool:
    return "*" in text or "?" in text


def _value(offer: Offer, field: str) -> str:
    one, price = offer.instance, offer.price
    values = {"providers": one.provider, "regions": price.region, "gpus": one.gpu.name, "instance_types": one.name}
    return values.get(field, price.tier).lower()


def _fits(value: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(value, p) if _is_pattern(p) else value == p for p in patterns)


def _passes(offer: Offer, exact: HardwareFilter) -> bool:
    return all(not getattr(exact, f) or _fits(_value(offer, f), getattr(exact, f)) for f in _FIELDS)


def _check_known(field: str, asked: Iterable[str], catalog: Catalog) -> None:
    known = {_value(offer, field) for offer in catalog.offers} if asked else set()
    if asked and field == "tiers":
        known.update(TIERS)
    if asked and field == "gpus":
        known.update(catalog.gpus)
    if asked and field == "instance_types":
        known.update(one.name.lower() for one in catalog.instances)
    for pattern in asked:
        if not any(_fits(value, (pattern,)) for value in known):
            raise UnknownNameError(_FIELDS[field], pattern, known, "`planner catalog list` shows all.")


def _clash(catalog: Catalog, exact: HardwareFilter) -> str:
    """How many offers each filter leaves on its own, and what dropping it would leave."""
    parts = []
    for field, word in _FIELDS.items():
        asked = getattr(exact, field)
        if asked:
            dropped: dict[str, Any] = {field: ()}
            without = replace(exact, **dropped)
            left = sum(_passes(o, without) for o in catalog.offers)
            parts.append(f"without {word} {'/'.join(asked)} {left} would remain")
    return "; ".join(parts)

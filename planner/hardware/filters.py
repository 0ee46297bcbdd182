"""Which offers a request may use: one pure predicate, and the checked selection built on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from fnmatch import fnmatchcase

from planner.errors import InvalidValueError, UnknownNameError
from planner.hardware.names import find_gpu
from planner.hardware.owned import owned_offers
from planner.hardware.records import Catalog, Offer
from planner.request import TIERS, HardwareFilter

_FIELDS = {"providers": "provider", "regions": "region", "gpus": "gpu", "instance_types": "instance", "tiers": "tier"}
_KINDS = {
    "providers": "provider",
    "regions": "region",
    "gpus": "GPU",
    "instance_types": "instance type",
    "tiers": "tier",
}


def matches(offer: Offer, wanted: HardwareFilter, catalog: Catalog) -> bool:
    """True when the offer passes every filter that is set (empty = everything; case is ignored, '*' and '?' are wildcards)."""
    return _passes(offer, _canonical(wanted, catalog))


def matching_offers(catalog: Catalog, wanted: HardwareFilter) -> tuple[Offer, ...]:
    """All offers that pass `wanted`; with wanted.owned the owned machines and nothing else.

    Errors: UnknownNameError for a provider, region, GPU, instance type or tier that no offer has; InvalidValueError when
    each is known and no offer has them together.
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
    lowered = {f: tuple(v.lower() for v in getattr(wanted, f)) for f in _FIELDS if f != "gpus"}
    return replace(wanted, gpus=gpus, **lowered)


def _is_pattern(text: str) -> bool:
    return "*" in text or "?" in text


def _value(offer: Offer, field: str) -> str:
    one = offer.instance
    value = {
        "providers": one.provider,
        "regions": offer.price.region,
        "gpus": one.gpu.name,
        "instance_types": one.name,
        "tiers": offer.price.tier,
    }[field]
    return value.lower()


def _fits(value: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(value, p) if _is_pattern(p) else value == p for p in patterns)


def _passes(offer: Offer, exact: HardwareFilter) -> bool:
    return all(not getattr(exact, f) or _fits(_value(offer, f), getattr(exact, f)) for f in _FIELDS)


def _check_known(field: str, asked: Iterable[str], catalog: Catalog) -> None:
    if not asked:
        return
    known = {_value(o, field): o for o in catalog.offers}
    if field == "tiers":
        known.update(dict.fromkeys(TIERS))  # type: ignore[arg-type]
    if field == "gpus":
        known.update(dict.fromkeys(catalog.gpus))  # type: ignore[arg-type]
    if field == "instance_types":
        known.update({i.name.lower(): None for i in catalog.instances})  # type: ignore[misc]
    for pattern in asked:
        if not any(_fits(value, (pattern,)) for value in known):
            raise UnknownNameError(_KINDS[field], pattern, known, "`planner catalog list` shows all.")


def _clash(catalog: Catalog, exact: HardwareFilter) -> str:
    """How many offers each filter leaves on its own, and what dropping it would leave."""
    parts = []
    for field, word in _FIELDS.items():
        asked = getattr(exact, field)
        if asked:
            without = replace(exact, **{field: ()})
            left = sum(_passes(o, without) for o in catalog.offers)
            parts.append(f"without {word} {'/'.join(asked)} {left} would remain")
    return "; ".join(parts)


_KNOWN_FIELDS = {f.name for f in fields(HardwareFilter)}
assert set(_FIELDS) <= _KNOWN_FIELDS  # noqa: S101 (a renamed field must not turn a filter off)

"""Integrity of a loaded catalog: what makes it wrong (faults) and what a reader should know (warnings)."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass

from planner.hardware.catalog import STALE_AFTER_DAYS, price_age_days
from planner.hardware.records import Catalog, Offer

SANE_USD_PER_GPU_HOUR = (0.02, 60.0)
"""Below: a price per chip or per minute slipped in. Above: a price per machine divided by nothing, or per month."""


@dataclass(frozen=True)
class CheckReport:
    """faults make the catalog wrong, warnings do not. One line each."""

    faults: tuple[str, ...]
    warnings: tuple[str, ...]


def check_catalog(catalog: Catalog, today: dt.date) -> CheckReport:
    """All checks that need more than one row: spot against on-demand, dates, price bounds, unpriced machines, age."""
    faults = [*catalog.problems, *_spot_faults(catalog), *_price_faults(catalog, today)]
    return CheckReport(tuple(faults), tuple(_warnings(catalog, today)))


def _where(offer: Offer) -> str:
    return f"{offer.instance.provider} {offer.instance.name} in {offer.price.region} ({offer.price.tier})"


def _spot_faults(catalog: Catalog) -> Iterator[str]:
    """Spot must be below on-demand of the same machine in the same region."""
    on_demand = {
        (o.instance.provider, o.instance.name, o.price.region): o.price.usd_per_hour
        for o in catalog.offers
        if o.price.tier == "on_demand"
    }
    for offer in catalog.offers:
        full = on_demand.get((offer.instance.provider, offer.instance.name, offer.price.region))
        if offer.price.tier == "spot" and full is not None and offer.price.usd_per_hour >= full:
            yield f"{_where(offer)}: spot {offer.price.usd_per_hour:g} is not below on-demand {full:g} USD/h"


def _price_faults(catalog: Catalog, today: dt.date) -> Iterator[str]:
    low, high = SANE_USD_PER_GPU_HOUR
    for offer in catalog.offers:
        if offer.price.observed_on > today:
            yield f"{_where(offer)}: observed on {offer.price.observed_on}, which is in the future"
        if not low <= offer.usd_per_gpu_hour <= high:
            yield f"{_where(offer)}: {offer.usd_per_gpu_hour:g} USD per GPU-hour is outside {low:g} to {high:g}"


def _warnings(catalog: Catalog, today: dt.date) -> Iterator[str]:
    age = price_age_days(catalog, today)
    if age is None:
        yield "no prices at all"
    elif age > STALE_AFTER_DAYS:
        yield f"the newest price is {age} days old (more than {STALE_AFTER_DAYS}): refresh prices/*.csv, see SCHEMA.md"
    priced = {(o.instance.provider, o.instance.name) for o in catalog.offers}
    for one in catalog.instances:
        if (one.provider, one.name) not in priced:
            yield f"{one.provider} {one.name} has no price ({one.unpriced or 'no reason given'})"
    guessed = sum(bool(gpu.unverified) for gpu in catalog.gpus.values())
    if guessed:
        yield f"{guessed} of {len(catalog.gpus)} GPUs have unverified fields: `planner catalog show GPU` names them"

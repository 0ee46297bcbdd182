"""The hardware catalog: packaged data plus one's own folders, read into one frozen Catalog.

Files and fields: hardware_catalog/SCHEMA.md. A broken packaged file becomes one line of Catalog.problems and leaves the
others standing; a broken file in one's own folder is a CatalogError.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import CatalogError
from planner.hardware.files import CatalogFile
from planner.hardware.filters import matches, matching_offers
from planner.hardware.names import find_gpu, gpu_names
from planner.hardware.owned import owned_notes, owned_offers
from planner.hardware.parse import NAME, PriceKey, parse_gpus, parse_instances, parse_links, parse_prices, parse_quotas
from planner.hardware.records import Catalog, Gpu, Instance, Link, Offer, Price

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = [
    "STALE_AFTER_DAYS",
    "find_gpu",
    "gpu_names",
    "load_catalog",
    "matches",
    "matching_offers",
    "owned_notes",
    "owned_offers",
    "price_age_days",
]

STALE_AFTER_DAYS = 14
"""A plan warns when its newest price is older than this; H100 list prices moved by 40% within six months of 2026."""


@dataclass
class _Layers:
    """What has been read so far; later folders override by key."""

    gpus: dict[str, Gpu] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    instances: dict[tuple[str, str], Instance] = field(default_factory=dict)
    prices: dict[PriceKey, Price] = field(default_factory=dict)
    quotas: list[tuple[str, str, str, str, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def copy(self) -> _Layers:
        return _Layers(
            dict(self.gpus),
            dict(self.links),
            dict(self.instances),
            dict(self.prices),
            list(self.quotas),
            list(self.problems),
            list(self.sources),
        )


def load_catalog(extra_dirs: Sequence[str | Path] = ()) -> Catalog:
    """The packaged catalog overridden by `extra_dirs` in order (same layout, any part of it).

    Keys: GPU name, link name, (provider, instance), (provider, instance, region, tier). Errors: CatalogError for a
    folder that does not exist, holds no catalog file, or holds a broken one.
    """
    layers = _packaged().copy()
    for folder in extra_dirs:
        _read_folder(Path(folder).expanduser(), str(folder), layers, strict=True)
    return _assemble(layers)


def price_age_days(catalog: Catalog, today: dt.date) -> int | None:
    """Days since the newest price was observed (0 when it is from the future); None without any price."""
    newest = catalog.newest_price
    return None if newest is None else max(0, (today - newest).days)


@cache
def _packaged() -> _Layers:
    layers = _Layers()
    _read_folder(files("hardware_catalog"), "hardware_catalog", layers, strict=False)
    return layers


def _read_folder(folder: Traversable, label: str, layers: _Layers, *, strict: bool) -> None:
    """Read one folder into `layers`. strict: raise the first fault; else note one problem a file and go on."""
    try:
        if not folder.is_dir():
            raise CatalogError(
                f"{label} is not a folder", "a catalog is a folder", "Its layout is in hardware_catalog/SCHEMA.md."
            )
        steps = list(_steps(folder, label, layers, strict))
    except OSError as error:
        raise CatalogError(f"{label} cannot be read", str(error.strerror or error)) from None
    if strict and not steps:
        known = "gpus.yaml, links.yaml, instances/*.csv, prices/*.csv, quotas.csv"
        raise CatalogError(
            f"{label} holds no catalog file", f"looked for {known}", "Its layout is in hardware_catalog/SCHEMA.md."
        )
    for step in steps:
        try:
            step()
        except CatalogError as error:
            if strict:
                raise
            layers.problems.append(str(error))
    layers.sources.append(label)


def _steps(folder: Traversable, label: str, layers: _Layers, strict: bool) -> Iterator[Callable[[], None]]:
    """One reader per file, in the order of dependence: links, GPUs, instances, prices, quotas."""

    def file(*parts: str) -> CatalogFile:
        return CatalogFile(folder.joinpath(*parts), "/".join((label, *parts)) if strict else "/".join(parts))

    def links() -> None:
        new = parse_links(file("links.yaml"), layers.links)
        layers.links.update(new)
        _relink(layers, new)

    def gpus() -> None:
        new = parse_gpus(file("gpus.yaml"), layers.links)
        layers.gpus.update(new)
        _regpu(layers, new)

    def quotas() -> None:
        layers.quotas.extend(parse_quotas(file("quotas.csv"), layers.instances))

    if folder.joinpath("links.yaml").is_file():
        yield links
    if folder.joinpath("gpus.yaml").is_file():
        yield gpus
    for part, read in (("instances", _read_instances), ("prices", _read_prices)):
        where = folder.joinpath(part)
        if where.is_dir():
            for name in sorted(entry.name for entry in where.iterdir()):
                if name.endswith((".csv", ".yaml", ".yml")):
                    yield lambda read=read, name=name, part=part: read(file(part, name), name, layers, strict)  # type: ignore[misc]
    if folder.joinpath("quotas.csv").is_file():
        yield quotas


def _provider(file: CatalogFile, name: str) -> str:
    provider, _, ending = name.rpartition(".")
    if ending != "csv":
        raise file.fail("", "instances and prices are CSV files")
    if not NAME.match(provider) or provider == "owned":
        raise file.fail("", "the file's name is the provider: lower-case letters, digits, '-' and '_', and not 'owned'")
    return provider


def _read_instances(file: CatalogFile, name: str, layers: _Layers, strict: bool) -> None:
    layers.instances.update(parse_instances(file, _provider(file, name), layers.gpus, layers.links))


def _read_prices(file: CatalogFile, name: str, layers: _Layers, strict: bool) -> None:
    new = parse_prices(file, _provider(file, name), layers.instances)
    tomorrow = dt.date.today() + dt.timedelta(days=1)
    late = next((key for key, price in new.items() if price.observed_on > tomorrow), None)
    if strict and late:
        raise file.fail(late[1], f"observed_on {new[late].observed_on} is in the future")
    layers.prices.update(new)


def _relink(layers: _Layers, new: dict[str, Link]) -> None:
    """Point earlier instances at links that a later folder overrides."""
    for key, one in layers.instances.items():
        if one.link.name in new or (one.fabric and one.fabric.name in new):
            fabric = new.get(one.fabric.name, one.fabric) if one.fabric else None
            layers.instances[key] = replace(one, link=new.get(one.link.name, one.link), fabric=fabric)


def _regpu(layers: _Layers, new: dict[str, Gpu]) -> None:
    """Point earlier instances at GPUs that a later folder overrides."""
    for key, one in layers.instances.items():
        if one.gpu.name in new:
            layers.instances[key] = replace(one, gpu=new[one.gpu.name])


def _assemble(layers: _Layers) -> Catalog:
    offers = []
    for (provider, name, _, _), price in layers.prices.items():
        instance = layers.instances[provider, name]
        quota = _quota(layers.quotas, instance, price)
        if quota != 0:
            offers.append(Offer(instance, price, quota))
    return Catalog(
        gpus=layers.gpus,
        links=layers.links,
        instances=tuple(layers.instances.values()),
        offers=tuple(offers),
        problems=tuple(layers.problems),
        sources=tuple(layers.sources),
    )


def _quota(quotas: list[tuple[str, str, str, str, int]], instance: Instance, price: Price) -> int | None:
    """The smallest quota that applies, None without one. A quota of 0 takes the offer out of the catalog."""
    fits = [
        most
        for provider, name, region, tier, most in quotas
        if provider == instance.provider
        and name in ("", instance.name)
        and region in ("", price.region)
        and tier in ("", price.tier)
    ]
    limits = [*fits, *([instance.max_count] if instance.max_count is not None else [])]
    return min(limits, default=None)

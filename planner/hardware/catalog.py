"""The hardware catalog: packaged data plus one's own folders, read into one frozen Catalog.

Files and fields: hardware_catalog/SCHEMA.md. A broken packaged file becomes one line of Catalog.problems and leaves the
others standing; a broken file in one's own folder is a CatalogError.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import CatalogError, UnknownNameError
from planner.hardware.files import CatalogFile
from planner.hardware.filters import matches, matching_offers
from planner.hardware.names import find_gpu, gpu_names
from planner.hardware.owned import owned_notes, owned_offers
from planner.hardware.parse import NAME, PriceKey, parse_gpus, parse_instances, parse_links, parse_prices, parse_quotas
from planner.hardware.records import Catalog, Gpu, Instance, KernelFile, Link, Offer, Price

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

_LAYOUT = (
    "links.yaml",
    "gpus.yaml",
    "kernels/<gpu>.csv",
    "instances/<provider>.csv",
    "prices/<provider>.csv",
    "quotas.csv",
)
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


def load_catalog(extra_dirs: Sequence[str | Path] = (), *, strict: bool = True) -> Catalog:
    """The packaged catalog overridden by `extra_dirs` in order (same layout, any part of it).

    Keys: GPU name, link name, (provider, instance), (provider, instance, region, tier). Errors: CatalogError for a
    folder that does not exist, holds no catalog file, or holds a broken one; with strict=False a broken file becomes a
    line of Catalog.problems instead.
    """
    layers = _packaged().copy()
    for folder in extra_dirs:
        _read_folder(_Folder(Path(folder).expanduser(), str(folder), own=True), layers, strict)
    return _assemble(layers)


def price_age_days(catalog: Catalog, today: dt.date) -> int | None:
    """Days since the newest price was observed (0 when it is from the future); None without any price."""
    newest = catalog.newest_price
    return None if newest is None else max(0, (today - newest).days)


@cache
def _packaged() -> _Layers:
    layers = _Layers()
    _read_folder(_Folder(files("hardware_catalog"), "hardware_catalog", own=False), layers, strict=False)
    return layers


@dataclass(frozen=True)
class _Folder:
    """A catalog folder; own = it belongs to the user, whose files are named in full and may hold no stray ones."""

    path: Traversable
    label: str
    own: bool

    def file(self, *parts: str) -> CatalogFile:
        return CatalogFile(self.path.joinpath(*parts), "/".join((self.label, *parts)) if self.own else "/".join(parts))

    def names(self, *parts: str) -> list[str]:
        """Sorted data files of a sub-folder; [] when there is no such folder."""
        where = self.path.joinpath(*parts) if parts else self.path
        found = sorted(entry.name for entry in where.iterdir()) if where.is_dir() else []
        return [name for name in found if name.endswith((".csv", ".yaml", ".yml"))]


def _read_folder(folder: _Folder, layers: _Layers, strict: bool) -> None:
    """Read one folder into `layers`. strict: raise the first fault; else note one problem a file and go on."""
    layout = "Its layout is in hardware_catalog/SCHEMA.md."
    try:
        if not folder.path.is_dir():
            raise CatalogError(f"{folder.label} is not a folder", "a catalog is a folder", layout)
        steps = _steps(folder, layers)
    except OSError as error:
        raise CatalogError(f"{folder.label} cannot be read", str(error.strerror or error)) from None
    if folder.own and not steps:
        raise CatalogError(f"{folder.label} holds no catalog file", f"looked for {', '.join(_LAYOUT)}", layout)
    for step in steps:
        try:
            step()
        except CatalogError as error:
            if strict:
                raise
            layers.problems.append(str(error))
    layers.sources.append(folder.label)


def _steps(folder: _Folder, layers: _Layers) -> list[Callable[[], None]]:
    """One reader a file, in the order of dependence: links, GPUs, instances, prices, quotas."""
    tops = folder.names()
    if stray := [name for name in tops if name not in _LAYOUT]:
        raise folder.file(stray[0]).fail("", f"not a catalog file (known: {', '.join(_LAYOUT)})")
    readers = (("links.yaml", _read_links), ("gpus.yaml", _read_gpus))
    steps = [partial(read, folder.file(name), layers) for name, read in readers if name in tops]
    if folder.own:  # ours are read when a time is asked for: planner.estimator.time.surfaces
        steps += [partial(_read_kernels, folder.file("kernels", n), n, layers) for n in folder.names("kernels")]
    steps += [partial(_read_instances, folder.file("instances", n), n, layers) for n in folder.names("instances")]
    steps += [partial(_read_prices, folder, n, layers) for n in folder.names("prices")]
    if "quotas.csv" in tops:
        steps.append(partial(_read_quotas, folder.file("quotas.csv"), layers))
    return list(steps)


def _read_links(file: CatalogFile, layers: _Layers) -> None:
    """Take new links in, and point earlier links and instances at those that they override."""
    new = parse_links(file, layers.links)
    layers.links.update(new)
    for name, link in layers.links.items():
        if link.beyond and link.beyond is not layers.links[link.beyond.name]:
            new[name] = layers.links[name] = replace(link, beyond=layers.links[link.beyond.name])
    for key, one in layers.instances.items():
        if one.link.name in new or (one.fabric and one.fabric.name in new):
            fabric = layers.links[one.fabric.name] if one.fabric else None
            layers.instances[key] = replace(one, link=layers.links[one.link.name], fabric=fabric)


def _read_gpus(file: CatalogFile, layers: _Layers) -> None:
    """Take new GPUs in, and point earlier instances at those that they override."""
    new = parse_gpus(file, layers.links)
    layers.gpus.update(new)
    _point_at(layers, new)


def _point_at(layers: _Layers, new: dict[str, Gpu]) -> None:
    for key, one in layers.instances.items():
        if one.gpu.name in new:
            layers.instances[key] = replace(one, gpu=new[one.gpu.name])


def _read_kernels(file: CatalogFile, name: str, layers: _Layers) -> None:
    """Give a GPU a measured surface of its own; the file's name is the GPU's."""
    gpu, _, ending = name.rpartition(".")
    if ending != "csv":
        raise file.fail("", "kernel surfaces are CSV files")
    if gpu not in layers.gpus:
        raise file.fail("", str(UnknownNameError("GPU", gpu, layers.gpus)).rstrip("."))
    layers.gpus[gpu] = replace(layers.gpus[gpu], kernels=KernelFile(file.label, file.text()))
    _point_at(layers, {gpu: layers.gpus[gpu]})


def _read_instances(file: CatalogFile, name: str, layers: _Layers) -> None:
    layers.instances.update(parse_instances(file, _provider(file, name), layers.gpus, layers.links))


def _read_prices(folder: _Folder, name: str, layers: _Layers) -> None:
    file = folder.file("prices", name)
    provider = _provider(file, name)
    if any(problem.startswith(folder.file("instances", name).label) for problem in layers.problems):
        return  # the machines could not be read: one problem is enough
    new = parse_prices(file, provider, layers.instances)
    tomorrow = dt.date.today() + dt.timedelta(days=1)
    late = next((key for key, price in new.items() if price.observed_on > tomorrow), None)
    if folder.own and late:
        raise file.fail(late[1], f"observed_on {new[late].observed_on} is in the future")
    layers.prices.update(new)


def _read_quotas(file: CatalogFile, layers: _Layers) -> None:
    layers.quotas.extend(parse_quotas(file, layers.instances))


def _provider(file: CatalogFile, name: str) -> str:
    provider, _, ending = name.rpartition(".")
    if ending != "csv":
        raise file.fail("", "instances and prices are CSV files")
    if not NAME.match(provider) or provider == "owned":
        raise file.fail("", "the file's name is the provider: lower-case letters, digits, '-' and '_', and not 'owned'")
    return provider


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

"""Equal hardware at different prices is one class: the estimators see the class, the solver sees its offers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.hardware.records import Gpu, Link, Offer


@dataclass(frozen=True)
class HardwareClass:
    """Machines that a model cannot tell apart: same GPU, count, link inside, fabric between. offers: cheapest first."""

    gpu: Gpu
    gpus_per_node: int
    link: Link
    fabric: Link | None
    offers: tuple[Offer, ...]

    @property
    def label(self) -> str:
        """How a person names it: 8x h100-sxm."""
        return f"{self.gpus_per_node}x {self.gpu.name}"


def _limit(offer: Offer) -> int | None:
    limits = [n for n in (offer.quota, offer.instance.max_count) if n is not None]
    return min(limits) if limits else None


def useful_offers(offers: Iterable[Offer], *, host_memory: bool = False) -> tuple[Offer, ...]:
    """The offers of one class and place that can ever be taken: in price order, up to the first one without a limit.

    A dearer offer in the same place is only worth taking when all cheaper ones can run out, or (host_memory) when it has more
    memory beside its GPUs than the cheaper ones that cannot.
    """
    kept: list[Offer] = []
    most: float | None = None
    for offer in sorted(offers, key=lambda o: (o.price.usd_per_hour, o.instance.provider, o.instance.name)):
        ram = _ram(offer)
        if most is None or (host_memory and ram > most):
            kept.append(offer)
            most = ram if _limit(offer) is None else most
    return tuple(kept)


def _ram(offer: Offer) -> float:
    """Host memory in GiB; without end where its owner states none."""
    return float("inf") if offer.host_ram_gib is None else offer.host_ram_gib


def offer_limit(offer: Offer) -> int | None:
    """How many of this offer one may take (quota and the provider's own limit); None = no stated limit."""
    return _limit(offer)


def group_offers(offers: Iterable[Offer], *, host_memory: bool = False) -> tuple[tuple[HardwareClass, ...], int]:
    """Hardware classes in a stable order, and how many offers were dropped as dearer copies of the same thing.

    Within a class every place (provider, region) keeps its useful offers; among places without limits only the
    cheapest place of each provider stays, since a dearer region of the same machine never wins. host_memory: what is asked may need
    memory beside the GPUs (training), so dearer machines with more of it stay too.
    """
    groups: dict[tuple[str, int, str, str], list[Offer]] = {}
    total = 0
    for offer in offers:
        total += 1
        i = offer.instance
        key = (i.gpu.name, i.gpu_count, i.link.name, i.fabric.name if i.fabric else "")
        groups.setdefault(key, []).append(offer)
    classes, kept = [], 0
    for _, members in sorted(groups.items()):
        places: dict[tuple[str, str], list[Offer]] = {}
        for offer in members:
            places.setdefault((offer.instance.provider, offer.price.region), []).append(offer)
        chosen: list[Offer] = []
        unlimited: dict[str, list[Offer]] = {}
        for (provider, _), here in sorted(places.items()):
            useful = useful_offers(here, host_memory=host_memory)
            if all(_limit(offer) is None for offer in useful):
                unlimited.setdefault(provider, []).extend(useful)
            else:
                chosen.extend(useful)
        for everywhere in unlimited.values():
            chosen.extend(useful_offers(everywhere, host_memory=host_memory))
        chosen.sort(key=lambda o: (o.price.usd_per_hour, o.instance.provider, o.instance.name, o.price.region))
        kept += len(chosen)
        first = members[0].instance
        classes.append(HardwareClass(first.gpu, first.gpu_count, first.link, first.fabric, tuple(chosen)))
    return tuple(classes), total - kept

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


def useful_offers(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    """The offers of one class and place that can ever be taken: in price order, up to the first one without a limit.

    A dearer offer in the same place is only worth taking when all cheaper ones can run out.
    """
    kept = []
    for offer in sorted(offers, key=lambda o: (o.price.usd_per_hour, o.instance.provider, o.instance.name)):
        kept.append(offer)
        if _limit(offer) is None:
            break
    return tuple(kept)


def offer_limit(offer: Offer) -> int | None:
    """How many of this offer one may take (quota and the provider's own limit); None = no stated limit."""
    return _limit(offer)


def group_offers(offers: Iterable[Offer]) -> tuple[tuple[HardwareClass, ...], int]:
    """Hardware classes in a stable order, and how many offers were dropped as dearer copies of the same thing.

    Within a class every place (provider, region) keeps its useful offers; among places without limits only the
    cheapest place of each provider stays, since a dearer region of the same machine never wins.
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
        best_unlimited: dict[str, Offer] = {}
        for (provider, _), here in sorted(places.items()):
            useful = useful_offers(here)
            if len(useful) == 1 and _limit(useful[0]) is None:
                best = best_unlimited.get(provider)
                if best is None or useful[0].price.usd_per_hour < best.price.usd_per_hour:
                    best_unlimited[provider] = useful[0]
            else:
                chosen.extend(useful)
        chosen.extend(best_unlimited.values())
        chosen.sort(key=lambda o: (o.price.usd_per_hour, o.instance.provider, o.instance.name, o.price.region))
        kept += len(chosen)
        first = members[0].instance
        classes.append(HardwareClass(first.gpu, first.gpu_count, first.link, first.fabric, tuple(chosen)))
    return tuple(classes), total - kept

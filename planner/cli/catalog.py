"""`planner catalog`: look into the hardware catalog, and check it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from planner.cli.once import OnceCommand
from planner.clock import today
from planner.errors import CatalogError, InvalidValueError, UnknownNameError
from planner.hardware import catalog as hardware
from planner.hardware.check import check_catalog
from planner.hardware.records import Catalog
from planner.report import catalog as report
from planner.request import HardwareFilter

app = typer.Typer(no_args_is_help=True, help="Hardware, prices and links the planner knows.")

Dirs = Annotated[
    list[str] | None, typer.Option("--catalog", metavar="DIR", help="Own catalog folder, overrides ours (repeatable).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _many(name: str, text: str) -> Any:
    return typer.Option(f"--{name}", help=f"{text} (repeatable, '*' is a wildcard).")


SHOWN = 40


@app.command("list", cls=OnceCommand)
def list_offers(
    provider: Annotated[list[str] | None, _many("provider", "Provider")] = None,
    gpu: Annotated[list[str] | None, _many("gpu", "GPU")] = None,
    region: Annotated[list[str] | None, _many("region", "Region")] = None,
    tier: Annotated[list[str] | None, _many("tier", "on_demand, spot or reserved")] = None,
    gpus_min: Annotated[int, typer.Option(help="At least this many GPUs in a machine.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Offers to show, 0 for all. [default: 40; with --json all]")] = None,
    catalog: Dirs = None,
    json: AsJson = False,
) -> None:
    """Offers, cheapest GPU-hour first."""
    if limit is not None and limit < 0:
        raise InvalidValueError(f"--limit {limit} is below 0", "", "Write --limit 40, or --limit 0 for all.")
    if gpus_min < 1:
        raise InvalidValueError(f"--gpus-min {gpus_min} is below 1", "", "Write for example --gpus-min 8.")
    known = hardware.load_catalog(catalog or ())
    wanted = HardwareFilter(tuple(provider or ()), tuple(region or ()), tuple(gpu or ()), (), tuple(tier or ()))
    offers = [o for o in hardware.matching_offers(known, wanted) if o.instance.gpu_count >= gpus_min]
    if not offers:
        raise InvalidValueError(f"no machine has {gpus_min} GPUs or more", "", "Lower --gpus-min.")
    offers.sort(key=lambda o: (o.usd_per_gpu_hour, o.instance.provider, o.instance.name, o.price.region, o.price.tier))
    most = limit if limit is not None else 0 if json else SHOWN
    shown = offers[:most] if most else offers
    if json:
        report.print_json([report.offer_facts(o) for o in shown])
    else:
        report.print_offers(shown, len(offers))


@app.command(cls=OnceCommand)
def show(
    name: Annotated[str, typer.Argument(help="A GPU, a link, or an instance type (as NAME or PROVIDER/NAME).")],
    catalog: Dirs = None,
    json: AsJson = False,
) -> None:
    """Everything known about one GPU, link or instance type: values, sources, what is unverified, all prices."""
    known = hardware.load_catalog(catalog or ())
    found = _look_up(name, known)
    if json:
        report.print_json(found)
        return
    for n, entry in enumerate(found):
        if n:
            typer.echo()
        prices = entry.pop("prices", [])
        report.print_facts(entry)
        for price in prices:
            label = f"{price['provider']} {price['instance_type']} {price['region']} {price['tier']}"
            typer.echo(f"  {price['usd_per_hour']:g} USD/h  {label}  {price['observed_on']}  {price['source']}")


def _look_up(name: str, known: Catalog) -> list[dict[str, Any]]:
    """Facts of what `name` means, each with 'entry' and, where it can be rented, 'prices'."""
    if name in known.links:
        return [{"entry": "link", **report.link_facts(known.links[name])}]
    wanted = name.lower()
    machines = [i for i in known.instances if wanted in (i.name.lower(), f"{i.provider}/{i.name}".lower())]
    if machines:
        return [
            {
                "entry": "instance",
                **report.instance_facts(i),
                "prices": [report.offer_facts(o) for o in known.offers if o.instance is i],
            }
            for i in machines
        ]
    try:
        gpu = hardware.find_gpu(name, known)
    except UnknownNameError as error:
        if "It could be" in str(error):
            raise
        names = {*known.gpus, *known.links, *(i.name for i in known.instances)}
        raise UnknownNameError(
            "GPU, link or instance type", name, names, "`planner catalog list` shows offers."
        ) from None
    offers = sorted((o for o in known.offers if o.instance.gpu is gpu), key=lambda o: o.usd_per_gpu_hour)
    return [{"entry": "gpu", **report.gpu_facts(gpu), "prices": [report.offer_facts(o) for o in offers]}]


@app.command(cls=OnceCommand)
def check(catalog: Dirs = None, json: AsJson = False) -> None:
    """Integrity of the catalog: exit 0 when it has no fault, 2 when it has."""
    known = hardware.load_catalog(catalog or (), strict=False)
    result = check_catalog(known, today())
    if json:
        report.print_json(
            {"faults": list(result.faults), "notes": list(result.warnings), "sources": list(known.sources)}
        )
    else:
        report.print_check(result, known)
    if result.faults:
        raise CatalogError(f"the catalog has {len(result.faults)} faults", result.faults[0])

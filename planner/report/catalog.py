"""The catalog on screen: tables for people, plain dictionaries for --json."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from planner.hardware.check import CheckReport
from planner.hardware.records import Catalog, Gpu, Instance, Link, Offer

Facts = dict[str, Any]


def offer_facts(offer: Offer) -> Facts:
    """One offer as plain values: the fields of `planner catalog list --json`."""
    one, price = offer.instance, offer.price
    return {
        "provider": one.provider,
        "instance_type": one.name,
        "gpu": one.gpu.name,
        "gpus": one.gpu_count,
        "usd_per_gpu_hour": round(offer.usd_per_gpu_hour, 4),
        "usd_per_hour": price.usd_per_hour,
        "region": price.region,
        "tier": price.tier,
        "observed_on": price.observed_on.isoformat(),
        "link": one.link.name,
        "fabric": one.fabric.name if one.fabric else None,
        "vcpus": one.vcpus,
        "ram_gib": one.ram_gib,
        "nvme_gb": one.nvme_gb,
        "quota": offer.quota,
        "source": price.source,
    }


def gpu_facts(gpu: Gpu) -> Facts:
    """All facts of a GPU; `unverified` lists those that no restatable source confirms."""
    return {
        "name": gpu.name,
        "vendor": gpu.vendor,
        "architecture": gpu.architecture,
        "compute_capability": gpu.compute_capability,
        "memory_gb": gpu.memory_gb,
        "usable_gib": gpu.usable_gib,
        "bandwidth_gb_per_s": gpu.bandwidth_gb_per_s,
        "peak_tflops_dense": gpu.peak_tflops,
        **({"matmul_tflops": gpu.matmul_tflops} if gpu.matmul_tflops else {}),
        "pcie_gen": gpu.pcie_gen,
        "tdp_w": gpu.tdp_w,
        "default_link": gpu.default_link,
        "bridge_link": gpu.bridge_link or None,
        "aliases": list(gpu.aliases),
        "unverified": list(gpu.unverified),
        "source": gpu.source,
        "caveat": gpu.caveat,
    }


def link_facts(link: Link) -> Facts:
    """All facts of a link."""
    return {
        "name": link.name,
        "kind": link.kind,
        "bandwidth_gb_per_s": link.bandwidth_gb_per_s,
        "per_peer_gb_per_s": link.per_peer_gb_per_s,
        "latency_us": link.latency_us,
        "max_gpus": link.max_gpus,
        "beyond": link.beyond.name if link.beyond else None,
        "measured_busbw_gb_per_s": link.measured_busbw_gb_per_s,
        "verified": link.verified,
        "source": link.source,
    }


def instance_facts(one: Instance) -> Facts:
    """All facts of an instance type, without its prices."""
    return {
        "provider": one.provider,
        "name": one.name,
        "gpu": one.gpu.name,
        "gpus": one.gpu_count,
        "link": one.link.name,
        "fabric": one.fabric.name if one.fabric else None,
        "network_gbit_per_s": one.network_gbit_per_s,
        "vcpus": one.vcpus,
        "ram_gib": one.ram_gib,
        "nvme_gb": one.nvme_gb,
        "max_count": one.max_count,
        "unpriced": one.unpriced or None,
        "caveat": one.caveat,
    }


def print_json(value: Any) -> None:
    """A value as indented JSON on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_offers(offers: Sequence[Offer], total: int) -> None:
    """A table of offers, in the order given; `total` says how many there are when only some are shown."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    numbers = ("USD/GPU-h", "USD/h", "GPUs")
    for heading in (*numbers, "GPU", "provider", "instance type", "region", "tier", "observed"):
        table.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    for offer in offers:
        one, price = offer.instance, offer.price
        cost = (f"{offer.usd_per_gpu_hour:.2f}", f"{price.usd_per_hour:.2f}", str(one.gpu_count), one.gpu.name)
        table.add_row(*cost, one.provider, one.name, price.region, price.tier, price.observed_on.isoformat())
    _console().print(table)
    if total > len(offers):
        print(f"{len(offers)} of {total} offers shown; --limit 0 shows all.")


def print_facts(facts: Facts) -> None:
    """Name and value, one a line; what is not known is shown as '-'."""
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v:g}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, float):
        return f"{value:g}"
    return "-" if value is None or value == "" else str(value)


def print_check(report: CheckReport, catalog: Catalog) -> None:
    """The integrity report: what was read, then faults, then warnings."""
    counts = f"{len(catalog.gpus)} GPUs, {len(catalog.links)} links, {len(catalog.instances)} instance types"
    print(f"read {counts}, {len(catalog.offers)} prices from {', '.join(catalog.sources)}")
    for line in report.faults:
        print(f"fault: {line}")
    for line in report.warnings:
        print(f"note: {line}")
    print("no faults" if not report.faults else f"{len(report.faults)} faults")


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200)

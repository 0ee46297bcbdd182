"""From catalog rows to records: every field is checked once, here. The first fault of a file is a CatalogError."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Mapping
from typing import Any, get_args

from planner.errors import UnknownNameError
from planner.hardware.files import CatalogFile, read_mapping, read_rows
from planner.hardware.records import Gpu, Instance, Link, LinkKind, Price, Tier

COMPUTE_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")
VENDORS = ("nvidia", "amd", "google", "cpu")
LINK_KINDS: tuple[str, ...] = get_args(LinkKind)
PRICE_TIERS: tuple[str, ...] = tuple(t for t in get_args(Tier) if t != "owned")
NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}$")
PriceKey = tuple[str, str, str, str]
OLDEST_PRICE_YEAR = 2015


class Row:
    """One named row of a file; its getters check and convert a field or raise a CatalogError that names it."""

    def __init__(self, file: CatalogFile, where: str, data: Mapping[str, Any]) -> None:
        self.file, self.where, self.data = file, where, data

    def fail(self, field: str, problem: str) -> Exception:
        """The CatalogError for a field of this row."""
        return self.file.fail(f"{self.where}, {field}", problem)

    def only(self, *fields: str) -> None:
        """Refuse fields nobody reads: a typo must not be ignored."""
        for key in self.data:
            if key not in fields:
                raise self.fail(str(key)[:60], f"unknown field (known: {', '.join(fields)})")

    def text(self, field: str, default: str | None = None) -> str:
        """A non-empty text, or the default."""
        value = self.data.get(field)
        if value is None or value == "":
            if default is None:
                raise self.fail(field, "is missing")
            return default
        if not isinstance(value, str):
            raise self.fail(field, f"must be text, not {value!r:.60}")
        return value

    def number(self, field: str, *, zero: bool = False) -> float:
        """A finite number above 0 (or from 0 when zero is allowed)."""
        value = self.optional_number(field, zero=zero)
        if value is None:
            raise self.fail(field, "is missing")
        return value

    def optional_number(self, field: str, *, zero: bool = False) -> float | None:
        """Like number, None when the field is absent or empty."""
        value = self.data.get(field)
        if value is None or value == "":
            return None
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise self.fail(field, f"must be a number, not {value!r:.60}")
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise self.fail(field, f"must be a number, not {value!r:.60}") from None
        if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
            raise self.fail(
                field,
                f"must be a finite number {'from 0' if zero else 'above 0'}, not {value!r:.60} (unknown is left empty)",
            )
        return number

    def optional_count(self, field: str, *, zero: bool = False, most: int = 10**6) -> int | None:
        """A whole number, None when absent or empty."""
        number = self.optional_number(field, zero=zero)
        if number is not None and (number != int(number) or number > most):
            raise self.fail(field, f"must be a whole number up to {most}, not {self.data[field]!r:.60}")
        return None if number is None else int(number)

    def choice(self, field: str, allowed: tuple[str, ...]) -> str:
        """A text that is one of `allowed`."""
        value = self.text(field)
        if value not in allowed:
            raise self.fail(field, f"must be one of {', '.join(allowed)}, not {value!r:.60}")
        return value

    def known(self, field: str, name: str, table: Mapping[str, Any], kind: str) -> Any:
        """table[name], or an error that names the nearest known names."""
        if name not in table:
            raise self.fail(field, str(UnknownNameError(kind, name, table)).rstrip("."))
        return table[name]

    def names(self, field: str) -> tuple[str, ...]:
        """A list of texts, () when absent."""
        value = self.data.get(field)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
            raise self.fail(field, "must be a list of texts")
        return tuple(value)


def parse_links(file: CatalogFile, below: Mapping[str, Link]) -> dict[str, Link]:
    """links.yaml: {name: Link}; `below` are the links of earlier layers, which `beyond` may name."""
    found: dict[str, Link] = {}
    rows = {name: Row(file, name, data) for name, data in read_mapping(file).items()}
    for name in sorted(rows, key=lambda n: bool(rows[n].data.get("beyond"))):
        row = rows[name]
        row.only(
            "kind",
            "bandwidth_gb_per_s",
            "latency_us",
            "max_gpus",
            "measured_busbw_gb_per_s",
            "per_peer_gb_per_s",
            "all_reduce_factor",
            "reduce_scatter_factor",
            "beyond",
            "verified",
            "source",
        )
        if not NAME.match(name):
            raise row.fail("name", "use lower-case letters, digits, '-', '.' and '_'")
        kind: Any = row.choice("kind", LINK_KINDS)
        verified = row.data.get("verified", False)
        if not isinstance(verified, bool):
            raise row.fail("verified", "must be true or false")
        max_gpus = row.optional_count("max_gpus")
        beyond = row.text("beyond", "")
        found[name] = Link(
            name=name,
            kind=kind,
            bandwidth_gb_per_s=row.number("bandwidth_gb_per_s", zero=kind == "none"),
            latency_us=row.number("latency_us", zero=kind == "none"),
            max_gpus=max_gpus or 1,
            measured_busbw_gb_per_s=row.optional_number("measured_busbw_gb_per_s"),
            verified=verified,
            source=row.text("source", ""),
            per_peer_gb_per_s=row.optional_number("per_peer_gb_per_s"),
            all_reduce_factor=row.optional_number("all_reduce_factor") or 1.0,
            reduce_scatter_factor=row.optional_number("reduce_scatter_factor") or 1.0,
            beyond=row.known("beyond", beyond, {**below, **found}, "link") if beyond else None,
        )
        if max_gpus is None:
            raise row.fail("max_gpus", "is missing")
    return {name: found[name] for name in rows}


_GPU_FIELDS = (
    "vendor", "architecture", "compute_capability", "memory_gb", "usable_gib", "bandwidth_gb_per_s", "pcie_gen",
    "tdp_w", "peak_tflops", "default_link", "bridge_link", "aliases", "unverified", "source", "caveat", "measured",
    "cpu_threads", "matmul_tflops",
)  # fmt: skip


def parse_gpus(file: CatalogFile, links: Mapping[str, Link]) -> dict[str, Gpu]:
    """gpus.yaml: {name: Gpu}; every default_link and bridge_link must be in `links`."""
    found: dict[str, Gpu] = {}
    for name, data in read_mapping(file).items():
        row = Row(file, name, data)
        row.only(*_GPU_FIELDS)
        if not NAME.match(name):
            raise row.fail("name", "use lower-case letters, digits, '-', '.' and '_'")
        vendor: Any = row.choice("vendor", VENDORS)
        memory_gb, usable_gib = row.number("memory_gb"), row.number("usable_gib")
        if usable_gib > memory_gb:
            raise row.fail(
                "usable_gib",
                f"{usable_gib:g} GiB cannot exceed the label of {memory_gb:g} GB (is the label decimal or binary?)",
            )
        bridge = row.text("bridge_link", "")
        found[name] = Gpu(
            name=name,
            vendor=vendor,
            architecture=row.text("architecture"),
            memory_gb=memory_gb,
            usable_gib=usable_gib,
            bandwidth_gb_per_s=row.number("bandwidth_gb_per_s"),
            peak_tflops=(peaks := _rates(row, "peak_tflops")),
            matmul_tflops=_matmul(row, peaks),
            compute_capability=row.optional_number("compute_capability"),
            pcie_gen=row.optional_count("pcie_gen", most=9) or 4,
            tdp_w=row.optional_number("tdp_w"),
            aliases=row.names("aliases"),
            unverified=row.names("unverified"),
            source=row.text("source", ""),
            caveat=row.text("caveat", ""),
            default_link=row.known("default_link", row.text("default_link"), links, "link").name,
            bridge_link=row.known("bridge_link", bridge, links, "link").name if bridge else "",
            measured=_measured(row),
            cpu_threads=row.optional_count("cpu_threads", most=4096),
        )
        if vendor == "nvidia" and found[name].compute_capability is None:
            raise row.fail("compute_capability", "is missing")
        if (vendor == "cpu") != (found[name].cpu_threads is not None):
            raise row.fail("cpu_threads", "is for vendor cpu, and needed there: threads of one device")
    return found


def _measured(row: Row) -> dict[str, float]:
    """Constants that were measured on the device; which names there are, the estimators know."""
    values = row.data.get("measured")
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise row.fail("measured", "must map names of constants to numbers")
    sub = Row(row.file, f"{row.where}, measured", values)
    return {name: sub.number(name, zero=True) for name in values}


def _rates(row: Row, field: str) -> dict[str, float]:
    """Rates by compute dtype."""
    rates = row.data.get(field)
    if not isinstance(rates, dict) or not rates:
        raise row.fail(field, "must map compute dtypes to dense 1e12 operations/s")
    sub = Row(row.file, f"{row.where}, {field}", rates)
    sub.only(*COMPUTE_DTYPES)
    return {dtype: sub.number(dtype) for dtype in rates}


def _matmul(row: Row, peaks: Mapping[str, float]) -> dict[str, float]:
    """Measured rates of matrix products, none above the peak; {} where nobody measured one."""
    rates = _rates(row, "matmul_tflops") if "matmul_tflops" in row.data else {}
    for dtype, rate in rates.items():
        if rate > peaks.get(dtype, 0.0):
            raise row.fail("matmul_tflops", f"{dtype}: {rate:g} is above the peak of {peaks.get(dtype, 0.0):g}")
    return rates


_INSTANCE_OPTIONAL = (
    "link",
    "fabric",
    "vcpus",
    "ram_gib",
    "nvme_gb",
    "network_gbit_per_s",
    "max_count",
    "unpriced",
    "caveat",
)


def parse_instances(
    file: CatalogFile, provider: str, gpus: Mapping[str, Gpu], links: Mapping[str, Link]
) -> dict[tuple[str, str], Instance]:
    """instances/<provider>.csv: {(provider, name): Instance}. An empty link is the GPU's default link."""
    found: dict[tuple[str, str], Instance] = {}
    for line, data in read_rows(file, ("name", "gpu", "gpu_count"), _INSTANCE_OPTIONAL):
        row = Row(file, f"line {line}", data)
        name = row.text("name")
        row.where = f"line {line} ({name[:60]})"
        gpu: Gpu = row.known("gpu", row.text("gpu"), gpus, "GPU")
        count = row.optional_count("gpu_count", most=256)
        if count is None:
            raise row.fail("gpu_count", "is missing")
        link: Link = row.known("link", row.text("link", "none" if count == 1 else gpu.default_link), links, "link")
        if count > 1 and count > link.max_gpus and link.beyond is None:
            raise row.fail("link", f"{link.name} joins at most {link.max_gpus} GPUs, the machine has {count}")
        fabric = row.text("fabric", "")
        if (provider, name) in found:
            raise row.fail("name", "is given twice")
        found[provider, name] = Instance(
            provider=provider,
            name=name,
            gpu=gpu,
            gpu_count=count,
            link=link,
            fabric=row.known("fabric", fabric, links, "link") if fabric else None,
            vcpus=row.optional_count("vcpus"),
            ram_gib=row.optional_number("ram_gib"),
            nvme_gb=row.optional_number("nvme_gb"),
            max_count=row.optional_count("max_count"),
            caveat=row.text("caveat", ""),
            network_gbit_per_s=row.optional_number("network_gbit_per_s"),
            unpriced=row.text("unpriced", ""),
        )
    return found


MOST_USD_PER_HOUR = 1_000_000


def parse_prices(
    file: CatalogFile, provider: str, instances: Mapping[tuple[str, str], Instance]
) -> dict[PriceKey, Price]:
    """prices/<provider>.csv: {(provider, instance, region, tier): Price}, USD per hour of the whole machine."""
    found: dict[PriceKey, Price] = {}
    names = {name: name for owner, name in instances if owner == provider}
    for line, data in read_rows(file, ("instance", "region", "tier", "usd_per_hour", "observed_on"), ("source",)):
        row = Row(file, f"line {line}", data)
        name = row.known("instance", row.text("instance"), names, "instance type")
        row.where = f"line {line} ({name[:60]})"
        tier: Any = row.choice("tier", PRICE_TIERS)
        region = row.text("region")
        key = (provider, name, region, tier)
        if key in found:
            raise row.fail("instance", f"has two {tier} prices in {region}")
        usd = row.number("usd_per_hour")
        if usd > MOST_USD_PER_HOUR:
            raise row.fail("usd_per_hour", f"is above {MOST_USD_PER_HOUR:,} USD, more than any machine costs")
        found[key] = Price(usd, region, tier, parse_date(row, "observed_on"), row.text("source", file.label))
    return found


def parse_date(row: Row, field: str) -> dt.date:
    """A date written YYYY-MM-DD."""
    text = row.text(field)
    try:
        date = dt.date.fromisoformat(text) if len(text) == 10 else None
    except ValueError:
        date = None
    if date is None or date.year < OLDEST_PRICE_YEAR:
        raise row.fail(field, f"must be a date like 2026-11-09, not {text!r:.60}")
    return date


def parse_quotas(
    file: CatalogFile, instances: Mapping[tuple[str, str], Instance]
) -> list[tuple[str, str, str, str, int]]:
    """quotas.csv: (provider, instance, region, tier, most machines); an empty instance, region or tier means all."""
    found = []
    providers = {owner: owner for owner, _ in instances}
    for line, data in read_rows(file, ("provider", "max_machines"), ("instance", "region", "tier")):
        row = Row(file, f"line {line}", data)
        provider = row.known("provider", row.text("provider"), providers, "provider")
        instance = row.text("instance", "")
        if instance:
            row.known("instance", instance, {n: n for p, n in instances if p == provider}, "instance type")
        most = row.optional_count("max_machines", zero=True)
        if most is None:
            raise row.fail("max_machines", "is missing")
        tier = row.choice("tier", PRICE_TIERS) if data.get("tier") else ""
        found.append((provider, instance, row.text("region", ""), tier, most))
    return found

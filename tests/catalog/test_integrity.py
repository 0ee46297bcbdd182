"""The shipped data, held against rules and against facts known from elsewhere."""

import csv
import datetime as dt
from importlib.resources import files

import pytest

from planner.hardware.catalog import find_gpu
from planner.hardware.check import check_catalog
from planner.hardware.parse import COMPUTE_DTYPES

# USD per GPU-hour between the cheapest spot and the dearest on-demand price a renter could meet, by GPU.
BOUNDS = {
    "t4": (0.1, 4.5),
    "v100": (0.1, 4),
    "a10": (0.3, 4.6),
    "a40": (0.3, 1.5),
    "l4": (0.2, 3.5),
    "rtx-3090": (0.1, 1),
    "rtx-4090": (0.2, 1.5),
    "rtx-5090": (0.3, 1.5),
    "rtx-a6000": (0.3, 1.5),
    "rtx-6000": (0.5, 1.5),
    "rtx-pro-4500": (1, 5),
    "rtx-pro-6000": (1, 7),
    "l40": (0.3, 8),
    "a100": (0.9, 6),
    "h100": (1, 13),
    "h200": (1, 12),
    "gh200": (1, 4),
    "b200": (2.5, 16),
    "b300": (5, 19),
    "gb200": (10, 32),
    "gb300": (15, 20),
    "mi300x": (0.9, 7),
    "mi355x": (5, 10),
    "tpu": (0.5, 5),
}


def offers_of(catalog, name, tier="on_demand"):
    return [o for o in catalog.offers if o.instance.name == name and o.price.tier == tier]


def only(found):
    assert len(found) == 1, found
    return found[0]


def test_every_file_was_read(catalog):
    assert catalog.problems == ()
    assert len(catalog.gpus) >= 50
    assert len(catalog.instances) >= 300
    assert len(catalog.offers) >= 380


def test_no_faults(catalog):
    assert check_catalog(catalog, dt.date.today()).faults == ()


def test_prices_are_positive_dated_sourced(catalog):
    for offer in catalog.offers:
        assert offer.price.usd_per_hour > 0
        assert dt.date(2026, 1, 1) <= offer.price.observed_on <= dt.date.today()
        assert len(offer.price.source) > 10
        assert offer.price.tier in ("on_demand", "spot", "reserved")


def test_spot_is_below_every_on_demand_price_of_the_machine(catalog):
    for spot in (o for o in catalog.offers if o.price.tier == "spot"):
        for full in offers_of(catalog, spot.instance.name):
            if full.instance is spot.instance:
                assert spot.price.usd_per_hour < full.price.usd_per_hour, spot


def test_usd_per_gpu_hour_is_sane_for_the_family(catalog):
    for offer in catalog.offers:
        name = offer.instance.gpu.name
        low, high = BOUNDS[max((family for family in BOUNDS if name.startswith(family)), key=len)]
        assert low <= offer.usd_per_gpu_hour <= high, offer


def test_every_instance_is_priced_or_says_why_not(catalog):
    priced = {(o.instance.provider, o.instance.name) for o in catalog.offers}
    for one in catalog.instances:
        assert ((one.provider, one.name) in priced) != bool(one.unpriced), one.name


def test_rows_of_the_files_are_unique():
    root = files("hardware_catalog")
    for part, keys in (("instances", ("name",)), ("prices", ("instance", "region", "tier"))):
        for entry in root.joinpath(part).iterdir():
            lines = [line for line in entry.read_text("utf-8").splitlines() if not line.startswith("#")]
            rows = [tuple(row[k] for k in keys) for row in csv.DictReader(lines)]
            assert len(rows) == len(set(rows)), entry.name


def test_machines_are_plausible(catalog):
    for one in catalog.instances:
        assert one.gpu_count in range(1, 17)
        assert (one.link.kind == "none") == (one.gpu_count == 1), one.name
        assert not one.link.kind.startswith("fabric")
        assert one.fabric is None or one.fabric.kind.startswith("fabric"), one.name
        assert one.vcpus is None or one.vcpus >= one.gpu_count
        assert one.ram_gib is None or 8 <= one.ram_gib <= 4096
        assert one.fabric is None or one.network_gbit_per_s is not None
        if one.fabric and one.network_gbit_per_s and one.gpu_count:
            assert one.fabric.bandwidth_gb_per_s * 8 <= one.network_gbit_per_s / one.gpu_count + 0.01


@pytest.mark.parametrize("field", ["memory_gb", "usable_gib", "bandwidth_gb_per_s"])
def test_gpu_numbers_are_positive(catalog, field):
    assert all(getattr(gpu, field) > 0 for gpu in catalog.gpus.values())


def test_gb_and_gib_are_not_mixed(catalog):
    for gpu in catalog.gpus.values():
        assert gpu.usable_gib * 2**30 <= gpu.memory_gb * 1.075e9, gpu.name
        assert gpu.usable_gib * 2**30 >= gpu.memory_gb * 0.9e9, gpu.name


def test_peaks_are_dense_and_ordered(catalog):
    for gpu in catalog.gpus.values():
        peaks = gpu.peak_tflops
        assert set(peaks) <= set(COMPUTE_DTYPES)
        if "fp16" in peaks and "bf16" in peaks:
            assert peaks["fp16"] == peaks["bf16"]
        if "fp8" in peaks and "bf16" in peaks:
            assert peaks["fp8"] == pytest.approx(peaks["bf16"], rel=0.01) or 1.9 <= peaks["fp8"] / peaks["bf16"] <= 2.05
        if gpu.compute_capability and gpu.compute_capability < 8:
            assert "bf16" not in peaks
        if gpu.compute_capability and gpu.compute_capability < 8.9:
            assert "fp8" not in peaks
        if gpu.compute_capability and gpu.compute_capability < 10:
            assert "fp4" not in peaks


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("rtx-4090", "fp16", 165.2),
        ("rtx-3090", "bf16", 71),
        ("rtx-5090", "fp4", 1676),
        ("h100-sxm", "bf16", 989.4),
        ("h100-pcie", "bf16", 756),
        ("l40s", "bf16", 362),
        ("a100-sxm-80", "bf16", 312),
        ("b200", "fp4", 9000),
        ("b300", "int8", 153.5),
        ("mi250-gcd", "bf16", 181),
        ("v100-pcie-16", "fp16", 112),
        ("a10g", "bf16", 70),
    ],
)
def test_peaks_that_tables_get_wrong(catalog, name, dtype, tflops):
    assert catalog.gpus[name].peak_tflops[dtype] == tflops


def test_unverified_names_fields(catalog):
    fields = set(catalog.gpus["t4"].__dataclass_fields__) | {"p2p"} | {f"peak_tflops.{d}" for d in COMPUTE_DTYPES}
    for gpu in catalog.gpus.values():
        assert set(gpu.unverified) <= fields, gpu.name
        assert gpu.source


def test_each_alias_means_one_gpu(catalog):
    for gpu in catalog.gpus.values():
        for alias in (gpu.name, gpu.name.upper(), gpu.name.replace("-", " "), *gpu.aliases):
            assert find_gpu(alias, catalog) is gpu, alias


def test_links_are_sourced_and_measured_below_the_wire_rate(catalog):
    for link in catalog.links.values():
        assert link.source
        if link.measured_busbw_gb_per_s:
            assert link.measured_busbw_gb_per_s <= link.bandwidth_gb_per_s
        if link.per_peer_gb_per_s:
            assert link.per_peer_gb_per_s < link.bandwidth_gb_per_s


def test_parts_without_peer_access_are_staged_through_the_host(catalog):
    for name in ("rtx-4090", "rtx-5090", "rtx-3090"):
        assert catalog.links[catalog.gpus[name].default_link].kind == "pcie-host"
    assert catalog.links["xgmi-mi300x"].per_peer_gb_per_s == 64


def test_p5_is_eight_h100_sxm_with_efa(catalog):
    offer = only(offers_of(catalog, "p5.48xlarge"))
    assert (offer.instance.gpu.name, offer.instance.gpu_count) == ("h100-sxm", 8)
    assert offer.instance.fabric.name == "efa-400g"
    assert offer.price.usd_per_hour == pytest.approx(55.04)
    assert offer.price.observed_on == dt.date(2026, 11, 9)


@pytest.mark.parametrize(
    ("name", "usd"),
    [
        ("p4d.24xlarge", 21.957642),
        ("Standard_ND96amsr_A100_v4", 32.77),
        ("a3-highgpu-8g", 88.49),
        ("gpu_8x_h100_sxm5", 31.92),
        ("Standard_NC80adis_H100_v5", 17.64),
        ("v5p-8", 16.8),
    ],
)
def test_whole_machine_prices(catalog, name, usd):
    assert only(offers_of(catalog, name)).price.usd_per_hour == pytest.approx(usd)


def test_azure_nc_h100_is_the_nvl_part(catalog):
    found = [i for i in catalog.instances if i.provider == "azure" and "_H100_v5" in i.name and "_NC" in i.name]
    assert len(found) == 3
    assert {i.gpu.name for i in found} == {"h100-nvl"}


def test_small_a3_machines_have_no_on_demand_price(catalog):
    for count in (1, 2, 4):
        assert offers_of(catalog, f"a3-highgpu-{count}g") == []
        assert offers_of(catalog, f"a3-highgpu-{count}g", "spot")


def test_four_bridged_cards_fall_back_to_pcie(catalog):
    one = next(i for i in catalog.instances if i.name == "Standard_NC96ads_A100_v4")
    assert (one.link.max_gpus, one.link.beyond.name) == (2, "pcie4-p2p")


def test_providers_asked_for_are_there(catalog):
    providers = {i.provider for i in catalog.instances}
    assert providers >= {"aws", "azure", "gcp", "lambda", "runpod", "oci", "coreweave", "nebius", "crusoe", "verda"}

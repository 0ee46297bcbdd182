"""What people type: GPU names, filters, own machines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InputError, InvalidValueError, UnknownNameError
from planner.hardware.catalog import find_gpu, load_catalog, matches, matching_offers, owned_notes, owned_offers
from planner.request import HardwareFilter


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("h100", "h100-sxm"),
        ("A100", "a100-sxm-80"),
        ("a100-80gb", "a100-sxm-80"),
        ("a100-40gb", "a100-sxm-40"),
        ("A100 PCIe 80GB", "a100-pcie-80"),
        ("4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("RTX-4090-24GB", "rtx-4090"),
        ("RTX 3080 Ti 12GB", "rtx-3080-ti"),
        ("RTX3090", "rtx-3090"),
        ("RTX 6000 Ada 48GB", "rtx-6000-ada"),
        ("RTX A6000 48GB", "rtx-a6000"),
        ("h100_sxm", "h100-sxm"),
        ("h100-80gb-sxm", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100-NVL-94GB", "h100-nvl"),
        ("AMD MI300X-NPS1-SPX-192GB-750W", "mi300x"),
        ("NVIDIA B200-SXM-180GB", "b200"),
        ("GH200-480GB", "gh200-96"),
        ("v5e", "tpu-v5e"),
        ("mi250", "mi250-gcd"),
    ],
)
def test_spellings(catalog, typed, name):
    assert find_gpu(typed, catalog).name == name


@pytest.mark.parametrize(("typed", "one"), [("v100", "v100-sxm2-32"), ("rtx-pro-6000", "rtx-pro-6000-ws")])
def test_ambiguous_name_lists_candidates(catalog, typed, one):
    with pytest.raises(UnknownNameError, match=f"could be.*{one}"):
        find_gpu(typed, catalog)


@pytest.mark.parametrize(("typed", "near"), [("h10-sxm", "h100-sxm"), ("rtx-409", "rtx-4090"), ("mi30x", "mi300x")])
def test_unknown_name_gives_the_nearest(catalog, typed, near):
    with pytest.raises(UnknownNameError, match=near):
        find_gpu(typed, catalog)


@given(st.text(max_size=300))
def test_any_name_is_found_or_refused_in_one_line(text):
    found = gpu_or_error(text)
    assert found is None or "\n" not in found


def gpu_or_error(text):
    try:
        find_gpu(text, load_catalog())
    except UnknownNameError as error:
        return str(error)
    return None


# ---- filters


def test_no_filter_gives_all_on_demand(catalog):
    assert {o.price.tier for o in matching_offers(catalog, HardwareFilter())} == {"on_demand"}
    assert len(matching_offers(catalog, HardwareFilter(tiers=()))) == len(catalog.offers)


@pytest.mark.parametrize(
    "wanted",
    [
        HardwareFilter(providers=("AWS",), gpus=("h100",)),
        HardwareFilter(gpus=("h100*",), tiers=()),
        HardwareFilter(regions=("us-*",), tiers=("spot",)),
        HardwareFilter(instance_types=("P5.48xlarge", "a3-highgpu-*")),
        HardwareFilter(providers=("lambda", "runpod"), gpus=("4090", "a100")),
    ],
)
def test_selection_is_exactly_the_predicate(catalog, wanted):
    found = matching_offers(catalog, wanted)
    assert found
    assert found == tuple(o for o in catalog.offers if matches(o, wanted, catalog))


def test_filters_mean_what_they_say(catalog):
    found = matching_offers(
        catalog, HardwareFilter(providers=("aws", "azure"), gpus=("h100", "a100-pcie-80"), tiers=())
    )
    assert {o.instance.provider for o in found} == {"aws", "azure"}
    assert {o.instance.gpu.name for o in found} == {"h100-sxm", "a100-pcie-80"}


@pytest.mark.parametrize(
    ("wanted", "near"),
    [
        (HardwareFilter(providers=("awss",)), "aws"),
        (HardwareFilter(regions=("us-east1x",)), "us-east1"),
        (HardwareFilter(gpus=("h1000",)), "h100"),
        (HardwareFilter(instance_types=("p5.48xlarg",)), "p5.48xlarge"),
        (HardwareFilter(tiers=("spott",)), "spot"),
        (HardwareFilter(providers=("nobody*",)), "provider"),
    ],
)
def test_unknown_filter_value(catalog, wanted, near):
    with pytest.raises(UnknownNameError, match=near):
        matching_offers(catalog, wanted)


@pytest.mark.parametrize(
    "wanted",
    [
        HardwareFilter(providers=("aws",), gpus=("mi300x",)),
        HardwareFilter(tiers=("reserved",)),
        HardwareFilter(gpus=("mi325x",)),
        HardwareFilter(instance_types=("a4-highgpu-8g",)),
    ],
)
def test_known_but_empty_combination_says_what_to_drop(catalog, wanted):
    with pytest.raises(InvalidValueError, match="would remain"):
        matching_offers(catalog, wanted)


def test_owned_machines_replace_the_catalog(catalog):
    found = matching_offers(catalog, HardwareFilter(owned="2xrtx-4090", providers=("aws",)))
    assert [o.instance.provider for o in found] == ["owned"]


# ---- own machines


@pytest.mark.parametrize(
    ("text", "gpu", "count", "machines", "link"),
    [
        ("rtx-4090", "rtx-4090", 1, 1, "none"),
        ("2xrtx-4090", "rtx-4090", 2, 1, "pcie4-host"),
        ("2 x RTX 4090", "rtx-4090", 2, 1, "pcie4-host"),
        ("2x4090", "rtx-4090", 2, 1, "pcie4-host"),
        ("2xrtx-3090", "rtx-3090", 2, 1, "pcie4-host"),
        ("4xrtx-3090+nvlink", "rtx-3090", 4, 1, "nvlink3-bridge-ga102"),
        ("8x8xa100-sxm-80", "a100-sxm-80", 8, 8, "nvswitch-nvlink3"),
        ("3x1xl40s", "l40s", 1, 3, "none"),
    ],
)
def test_own_machine(catalog, text, gpu, count, machines, link):
    (offer,) = owned_offers(text, None, catalog)
    one = offer.instance
    assert (one.gpu.name, one.gpu_count, offer.quota, one.link.name) == (gpu, count, machines, link)
    assert (offer.price.usd_per_hour, offer.price.tier, offer.price.region, one.provider) == (
        0,
        "owned",
        "local",
        "owned",
    )
    assert (one.vcpus, one.ram_gib, one.fabric) == (None, None, None)


def test_fabric_is_shared_by_the_gpus_of_a_machine(catalog):
    (offer,) = owned_offers("8x8xa100", 1600, catalog)
    assert offer.instance.fabric.bandwidth_gb_per_s == 25
    assert offer.instance.fabric.kind == "fabric-rdma"
    (slow,) = owned_offers("2x4xl40s", 10, catalog)
    assert (slow.instance.fabric.kind, slow.instance.fabric.bandwidth_gb_per_s) == ("fabric-tcp", 10 / 8 / 4)


def test_several_machines_and_repeats(catalog):
    offers = owned_offers("2xrtx-4090, 4xl40s ,2xrtx-4090", None, catalog)
    assert [(o.instance.name, o.quota) for o in offers] == [("2xrtx-4090", 2), ("4xl40s", 1)]


def test_notes_state_what_was_assumed(catalog):
    notes = " ".join(owned_notes("8x8xa100", None, catalog))
    assert "no --fabric-gbps" in notes
    assert "0 USD/h" in notes
    assert "taken as RDMA" in " ".join(owned_notes("8x8xa100", 1600, catalog))
    assert "not used" in " ".join(owned_notes("2xrtx-4090", 100, catalog))


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "x",
        "2x",
        "0xa100",
        "0x2xa100",
        "2x0xa100",
        "99999x8xa100",
        "9999999xt4",
        "2x2x2xt4",
        "2xnothing",
        "16xh100",
        "2xh100+nvlink",
        "-1xt4",
    ],
)
def test_bad_own_machine_is_one_line(catalog, text):
    with pytest.raises(InputError) as caught:
        owned_offers(text, None, catalog)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("gbps", [0, -1, float("nan"), float("inf")])
def test_bad_fabric(catalog, gbps):
    with pytest.raises(InvalidValueError, match="fabric-gbps"):
        owned_offers("2x8xa100", gbps, catalog)


@pytest.mark.parametrize("count", ["-1", "1.5", "99999999999"])
def test_a_wrong_count_is_not_blamed_on_the_gpu(catalog, count):
    with pytest.raises(InvalidValueError, match=f"{count} is no count"):
        owned_offers(f"{count}xrtx-4090", None, catalog)

"""Own folders, overrides, quotas, and every way a file can be broken."""

import datetime as dt
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import CatalogError, PlannerError
from planner.hardware import catalog as module
from planner.hardware.catalog import load_catalog, price_age_days
from planner.hardware.records import Catalog

PRICE = "instance,region,tier,usd_per_hour,observed_on,source\n"
GPU = """
{name}:
  vendor: nvidia
  architecture: ampere
  compute_capability: 8.6
  memory_gb: 24
  usable_gib: 23.5
  bandwidth_gb_per_s: 900
  pcie_gen: 4
  peak_tflops: {{fp16: 70}}
  default_link: pcie4-p2p
"""


@pytest.fixture
def write(tmp_path):
    def write_file(path, text):
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path

    return write_file


def error_of(folder):
    try:
        load_catalog([folder])
    except PlannerError as error:
        return error
    return None


def fault(folder):
    with pytest.raises(CatalogError) as caught:
        load_catalog([folder])
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in text
    assert len(text) < 400
    return text


def price_of(catalog, name, region, tier):
    return [
        o.price.usd_per_hour
        for o in catalog.offers
        if (o.instance.name, o.price.region, o.price.tier) == (name, region, tier)
    ]


def test_own_price_overrides_by_key_and_adds(write, catalog):
    folder = write(
        "prices/aws.csv",
        PRICE
        + "p5.48xlarge,us-east-1,on_demand,40,2026-11-01,ours\n# a comment\n"
        + "p5.48xlarge,us-east-1,reserved,30,2026-11-01,ours\n",
    )
    mine = load_catalog([folder])
    assert price_of(mine, "p5.48xlarge", "us-east-1", "on_demand") == [40]
    assert price_of(mine, "p5.48xlarge", "us-east-1", "reserved") == [30]
    assert len(mine.offers) == len(catalog.offers) + 1
    assert price_of(load_catalog(), "p5.48xlarge", "us-east-1", "on_demand") == [55.04]


def test_later_folder_wins(tmp_path, write):
    write("one/prices/aws.csv", PRICE + "p5.48xlarge,us-east-1,on_demand,40,2026-11-01,a\n")
    write("two/prices/aws.csv", PRICE + "p5.48xlarge,us-east-1,on_demand,41,2026-11-01,b\n")
    both = load_catalog([tmp_path / "one", str(tmp_path / "two")])
    assert price_of(both, "p5.48xlarge", "us-east-1", "on_demand") == [41]


def test_own_gpu_reaches_packaged_and_own_machines(write):
    write("gpus.yaml", GPU.format(name="a10g") + GPU.format(name="my-card"))
    folder = write("instances/cellar.csv", "name,gpu,gpu_count\nbox,my-card,2\nsmall,my-card,1\n")
    mine = load_catalog([folder])
    assert {i.gpu.bandwidth_gb_per_s for i in mine.instances if i.gpu.name == "a10g"} == {900}
    links = {i.name: i.link.name for i in mine.instances if i.provider == "cellar"}
    assert links == {"box": "pcie4-p2p", "small": "none"}


def test_own_link_reaches_packaged_machines_and_bridges(write):
    folder = write("links.yaml", "pcie4-p2p: {kind: pcie-p2p, bandwidth_gb_per_s: 20, latency_us: 3, max_gpus: 16}\n")
    mine = load_catalog([folder])
    assert {i.link.bandwidth_gb_per_s for i in mine.instances if i.link.name == "pcie4-p2p"} == {20}
    bridged = next(i for i in mine.instances if i.name == "Standard_NC96ads_A100_v4")
    assert bridged.link.beyond.bandwidth_gb_per_s == 20
    assert mine.links["pcie4-p2p"].verified is False


def test_quotas_cap_and_remove_offers(write):
    folder = write(
        "quotas.csv",
        "provider,instance,region,tier,max_machines\naws,p5.48xlarge,us-east-1,,4\naws,,,,9\ngcp,,,spot,0\n",
    )
    mine = load_catalog([folder])
    quota = {(o.instance.name, o.price.tier): o.quota for o in mine.offers if o.instance.provider == "aws"}
    assert quota["p5.48xlarge", "on_demand"] == 4
    assert quota["p5.48xlarge", "spot"] == 9
    assert {o.price.tier for o in mine.offers if o.instance.provider == "gcp"} == {"on_demand"}
    assert all(o.quota is None for o in mine.offers if o.instance.provider == "azure")


def test_examples_of_the_schema_load(write):
    write("prices/aws.csv", PRICE + "p5.48xlarge,us-east-1,reserved,39.50,2026-11-20,our contract\n")
    write("instances/cellar.csv", "name,gpu,gpu_count,link,fabric,ram_gib\nnode-a,a100-sxm-80,8,,ib-200g,2048\n")
    write(
        "prices/cellar.csv",
        "instance,region,tier,usd_per_hour,observed_on\nnode-a,basement,on_demand,3.10,2026-11-20\n",
    )
    folder = write(
        "quotas.csv", "provider,instance,region,tier,max_machines\naws,p5.48xlarge,us-east-1,,4\ngcp,,,spot,0\n"
    )
    mine = load_catalog([folder])
    offer = next(o for o in mine.offers if o.instance.provider == "cellar")
    assert offer.instance.link.name == "nvswitch-nvlink3"
    assert offer.price.source.endswith("prices/cellar.csv")
    assert mine.sources == ("hardware_catalog", str(folder))


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ("p5.48xlarge,us-east-1,on_demand,0,2026-11-01,x", ("line 2", "usd_per_hour", "above 0")),
        ("p5.48xlarge,us-east-1,on_demand,-3,2026-11-01,x", ("usd_per_hour",)),
        ("p5.48xlarge,us-east-1,on_demand,nan,2026-11-01,x", ("usd_per_hour", "finite")),
        ("p5.48xlarge,us-east-1,on_demand,inf,2026-11-01,x", ("usd_per_hour", "finite")),
        ("p5.48xlarge,us-east-1,on_demand,1e999,2026-11-01,x", ("usd_per_hour", "finite")),
        ("p5.48xlarge,us-east-1,on_demand,$40,2026-11-01,x", ("usd_per_hour", "number")),
        ("p5.48xlarge,us-east-1,on_demand,,2026-11-01,x", ("usd_per_hour", "missing")),
        ("p5.48xlarge,us-east-1,ondemand,40,2026-11-01,x", ("tier", "on_demand")),
        ("p5.48xlarge,us-east-1,owned,40,2026-11-01,x", ("tier",)),
        ("p5.48xlarge,,on_demand,40,2026-11-01,x", ("region", "missing")),
        ("p5.48xlarge,us-east-1,on_demand,40,2026-13-01,x", ("observed_on", "2026-13-01")),
        ("p5.48xlarge,us-east-1,on_demand,40,yesterday,x", ("observed_on",)),
        ("p5.48xlarge,us-east-1,on_demand,40,20261101,x", ("observed_on",)),
        ("p5.48xlarge,us-east-1,on_demand,40,2999-01-01,x", ("observed_on", "future")),
        ("p5.48xlarge,us-east-1,on_demand,40,0001-01-01,x", ("observed_on",)),
        ("p5.48xlarg,us-east-1,on_demand,40,2026-11-01,x", ("instance", "p5.48xlarge")),
        ("p5.48xlarge,us-east-1,on_demand,40,2026-11-01", ("line 2", "5 fields")),
        ('"p5.48xlarge,us-east-1,on_demand,40,2026-11-01,x', ("line 2",)),
    ],
)
def test_broken_price_row(write, row, names):
    text = fault(write("prices/aws.csv", PRICE + row + "\n"))
    assert "prices/aws.csv" in text
    assert all(name in text for name in names), text


def test_price_given_twice(write):
    row = "p5.48xlarge,us-east-1,on_demand,40,2026-11-01,x\n"
    assert "two on_demand prices" in fault(write("prices/aws.csv", PRICE + row + row))


@pytest.mark.parametrize(
    ("path", "text", "names"),
    [
        ("prices/aws.csv", "instance,region,tier,usd_per_hour\n", ("observed_on", "missing")),
        ("prices/aws.csv", "instance,region,tier,usd_per_hour,observed_on,colour\n", ("colour", "known")),
        ("prices/aws.csv", b"\xff\xfe\x00\x01", ("UTF-8",)),
        ("prices/aws.csv", b"a\0b", ("binary",)),
        ("prices/aws.yaml", "a: {}", ("CSV",)),
        ("prices/owned.csv", PRICE, ("provider", "owned")),
        ("prices/Big Corp.csv", PRICE, ("provider",)),
        ("instances/acme.csv", "name,gpu,gpu_count\nbox,h1000,8\n", ("line 2", "gpu", "h100")),
        ("instances/acme.csv", "name,gpu,gpu_count\nbox,h100-sxm,0\n", ("gpu_count",)),
        ("instances/acme.csv", "name,gpu,gpu_count\nbox,h100-sxm,2.5\n", ("gpu_count", "whole")),
        ("instances/acme.csv", "name,gpu,gpu_count\nbox,h100-sxm,\n", ("gpu_count", "missing")),
        ("instances/acme.csv", "name,gpu,gpu_count\nbox,h100-sxm,16\n", ("link", "at most 8")),
        ("instances/acme.csv", "name,gpu,gpu_count,link\nbox,h100-sxm,8,nvlinkk\n", ("link", "nvlink")),
        ("instances/acme.csv", "name,gpu,gpu_count,ram_gib\nbox,h100-sxm,8,lots\n", ("ram_gib", "number")),
        ("instances/acme.csv", "name,gpu,gpu_count\nbox,t4,1\nbox,t4,2\n", ("line 3", "twice")),
        ("quotas.csv", "provider,max_machines\nawss,4\n", ("provider", "aws")),
        ("quotas.csv", "provider,instance,max_machines\naws,p6,4\n", ("instance",)),
        ("quotas.csv", "provider,max_machines\naws,-1\n", ("max_machines",)),
        ("quotas.csv", "provider,max_machines\naws,\n", ("max_machines", "missing")),
        ("quota.csv", "provider,max_machines\n", ("quota.csv", "quotas.csv")),
        ("gpus.yaml", "- a\n- b\n", ("gpus.yaml", "mapping")),
        ("gpus.yaml", "just text", ("mapping",)),
        ("gpus.yaml", "x: 3\n", ("x", "mapping")),
        ("gpus.yaml", "1: {}\n", ("names must be text",)),
        ("gpus.yaml", "x: {a: [}\n", ("line 1", "YAML")),
        ("gpus.yaml", "x: !!python/object/apply:os.system [id]\n", ("YAML",)),
        ("gpus.yaml", "x: !!timestamp soon\n", ("YAML",)),
        ("gpus.yaml", "x: !!bool maybe\n", ("YAML",)),
        ("gpus.yaml", "!!map text\n", ("YAML",)),
        ("gpus.yaml", "? [a, b]\n: {}\n", ("YAML",)),
        ("gpus.yaml", "x: 2020-99-99\n", ("YAML",)),
        ("gpus.yaml", "a: &a {x: 1}\nb: *a\n", ("anchors",)),
        ("gpus.yaml", GPU.format(name="x") + GPU.format(name="x"), ("'x'", "twice")),
        ("gpus.yaml", GPU.format(name="X Y"), ("X Y", "lower-case")),
        ("gpus.yaml", GPU.format(name="x") + "  colour: red\n", ("x", "colour")),
        ("gpus.yaml", GPU.format(name="x").replace("23.5", "24.5"), ("usable_gib", "24.5")),
        ("gpus.yaml", GPU.format(name="x") + "  matmul_tflops: {bf16: 1.0e+6}\n", ("matmul_tflops", "above the peak")),
        ("gpus.yaml", GPU.format(name="x").replace("900", ".nan"), ("bandwidth_gb_per_s", "finite")),
        ("gpus.yaml", GPU.format(name="x").replace("900", "fast"), ("bandwidth_gb_per_s", "number")),
        ("gpus.yaml", GPU.format(name="x").replace("900", "true"), ("bandwidth_gb_per_s", "number")),
        ("gpus.yaml", GPU.format(name="x").replace("fp16: 70", "fp16: 0"), ("peak_tflops", "fp16", "above 0")),
        ("gpus.yaml", GPU.format(name="x").replace("fp16: 70", "fp15: 70"), ("peak_tflops", "fp15")),
        ("gpus.yaml", GPU.format(name="x").replace("{fp16: 70}", "70"), ("peak_tflops",)),
        ("gpus.yaml", GPU.format(name="x").replace("pcie4-p2p", "pcie4"), ("default_link", "pcie4-p2p")),
        ("gpus.yaml", GPU.format(name="x").replace("nvidia", "intel"), ("vendor", "nvidia")),
        ("gpus.yaml", GPU.format(name="x") + "  aliases: x1\n", ("aliases", "list")),
        ("links.yaml", "l: {kind: tube, bandwidth_gb_per_s: 1, latency_us: 1, max_gpus: 2}", ("kind", "tube")),
        (
            "links.yaml",
            "l: {kind: pcie-p2p, bandwidth_gb_per_s: 0, latency_us: 1, max_gpus: 2}",
            ("bandwidth_gb_per_s",),
        ),
        ("links.yaml", "l: {kind: pcie-p2p, bandwidth_gb_per_s: 1, latency_us: 1}", ("max_gpus",)),
        (
            "links.yaml",
            "l: {kind: pcie-p2p, bandwidth_gb_per_s: 1, latency_us: 1, max_gpus: 2, beyond: m}",
            ("beyond",),
        ),
    ],
)
def test_broken_file(write, path, text, names):
    message = fault(write(path, text))
    assert all(name in message for name in names), message


def test_yaml_bomb_and_deep_nesting_are_refused(write):
    bomb = "a: &a [x,x,x,x,x,x,x,x]\n" + "".join(
        f"{c}: &{c} [*{p},*{p},*{p},*{p},*{p},*{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
    )
    assert "anchors" in fault(write("gpus.yaml", bomb))
    assert "gpus.yaml" in fault(write("gpus.yaml", "a: " + "[" * 100_000))


def test_huge_file_is_refused(write):
    assert "larger than" in fault(write("prices/aws.csv", "#" * (5 * 2**20)))


def test_folders_that_are_none(tmp_path):
    assert "not a folder" in fault(tmp_path / "missing")
    (tmp_path / "file").write_text("x")
    assert "not a folder" in fault(tmp_path / "file")
    assert "holds no catalog file" in fault(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_fifo_does_not_hang(tmp_path):
    (tmp_path / "prices").mkdir()
    os.mkfifo(tmp_path / "prices" / "aws.csv")
    assert "regular file" in fault(tmp_path)


def test_lenient_loading_lists_each_broken_file_once(write):
    write("prices/aws.csv", PRICE + "p5.48xlarge,us-east-1,on_demand,0,2026-11-01,x\n")
    write("prices/gcp.csv", PRICE + "a3-highgpu-8g,us-central1,on_demand,80,2026-11-01,x\n")
    folder = write("instances/acme.csv", "name,gpu,gpu_count\nbox,nothing,8\n")
    mine = load_catalog([folder], strict=False)
    assert len(mine.problems) == 2
    assert price_of(mine, "a3-highgpu-8g", "us-central1", "on_demand") == [80]


def test_broken_packaged_provider_leaves_the_others(tmp_path, monkeypatch):
    import shutil
    from importlib.resources import files
    from pathlib import Path

    copy = tmp_path / "hardware_catalog"
    shutil.copytree(Path(str(files("hardware_catalog"))), copy)
    (copy / "instances" / "aws.csv").write_bytes(b"\xff\xff")
    monkeypatch.setattr(module, "files", lambda _: copy)
    module._packaged.cache_clear()
    try:
        broken = load_catalog()
    finally:
        module._packaged.cache_clear()
    assert len(broken.problems) == 1
    assert broken.problems[0].startswith("instances/aws.csv")
    providers = {o.instance.provider for o in broken.offers}
    assert "aws" not in providers
    assert len(providers) >= 11


def test_price_age(catalog):
    newest = catalog.newest_price
    assert price_age_days(catalog, newest) == 0
    assert price_age_days(catalog, newest + dt.timedelta(days=15)) == 15
    assert price_age_days(catalog, newest - dt.timedelta(days=1)) == 0
    assert price_age_days(replace(catalog, offers=()), newest) is None
    assert isinstance(catalog, Catalog)


FIELD = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.lists(FIELD, min_size=6, max_size=6))
def test_any_price_row_loads_or_gives_one_line(tmp_path_factory, fields):
    folder = tmp_path_factory.mktemp("any")
    (folder / "prices").mkdir()
    (folder / "prices" / "aws.csv").write_text(PRICE + ",".join(fields) + "\n", encoding="utf-8")
    error = error_of(folder)
    assert error is None or (isinstance(error, CatalogError) and "\n" not in str(error))


@given(st.binary(max_size=300))
def test_any_bytes_as_gpus_file_load_or_give_one_line(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("any")
    (folder / "gpus.yaml").write_bytes(data)
    error = error_of(folder)
    assert error is None or (isinstance(error, CatalogError) and "\n" not in str(error))

"""A small catalog cut from the shipped one: enough hardware to choose from, little enough to solve in milliseconds."""

from dataclasses import replace

import pytest

from planner.hardware.catalog import load_catalog

KEPT = {"a100-sxm-80", "h100-sxm", "l40s", "rtx-4090", "a100-pcie-80"}


@pytest.fixture(scope="session")
def small_catalog():
    catalog = load_catalog()
    offers = tuple(
        o
        for o in catalog.offers
        if o.instance.gpu.name in KEPT
        and o.price.tier == "on_demand"
        and o.instance.provider in ("lambda", "runpod", "verda", "aws")
    )
    return replace(catalog, offers=offers)


@pytest.fixture(scope="session")
def model_8b():
    from planner.models import load_model

    return load_model("llama-3.1-8b")


@pytest.fixture(scope="session")
def model_70b():
    from planner.models import load_model

    return load_model("llama-3.3-70b")

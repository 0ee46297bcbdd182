"""Dearer machines with more memory beside their GPUs: kept where a run is offloaded, and chosen where only they hold it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.hardware.catalog import load_catalog
from planner.hardware.records import Catalog, Offer
from planner.models import load_model
from planner.request import HardwareFilter, TrainJob, TrainPins, TrainRequest
from planner.solver.training import solve_training
from planner.space.hardware_classes import group_offers, useful_offers

CATALOG = load_catalog()
MODEL = load_model("llama-3.1-8b")
BASE = next(o for o in CATALOG.offers if o.instance.gpu.name == "a100-sxm-80" and o.instance.gpu_count == 1)


def offer(name: str, usd: float, ram: float | None, quota: int | None = None, region: str = "") -> Offer:
    instance = replace(BASE.instance, name=name, ram_gib=ram, max_count=None)
    price = replace(BASE.price, usd_per_hour=usd, region=region or BASE.price.region)
    return Offer(instance, price, quota)


SMALL, LARGE, HUGE = offer("small", 1.0, 60), offer("large", 2.0, 400), offer("huge", 5.0, 800)


def solved(*offers: Offer, offload: str, goal: str = "cheapest"):
    catalog: Catalog = replace(CATALOG, offers=offers)
    pins = TrainPins(framework="deepspeed", offload=offload, data_parallel=1)
    job = TrainJob(tokens=1e6, seq_len=2048)
    request = TrainRequest("llama-3.1-8b", job=job, goal=goal, hardware=HardwareFilter(), pins=pins)
    return solve_training(request, MODEL, catalog, ())


@pytest.mark.parametrize("goal", ["cheapest", "fastest"])
def test_the_only_machine_with_enough_memory_wins_though_it_is_dearer(goal):
    plan = solved(SMALL, LARGE, HUGE, offload="optimizer+parameters", goal=goal)
    assert plan.deployment is not None, plan.infeasible
    assert [o.instance_type for o in plan.deployment.offers] == ["large"]
    assert plan.memory.host_ram_gib > 60
    assert solved(SMALL, offload="optimizer+parameters", goal=goal).deployment is None


def test_a_dearer_place_of_the_same_provider_may_have_it():
    near, far = offer("small", 1.0, 60, region="here"), offer("large", 2.0, 400, region="there")
    assert solved(near, far, offload="optimizer+parameters").deployment.offers[0].region == "there"


def test_dearer_machines_stay_only_for_more_memory():
    less = offer("less", 3.0, 300)
    assert useful_offers((SMALL, LARGE, less, HUGE)) == (SMALL,)
    assert useful_offers((SMALL, LARGE, less, HUGE), host_memory=True) == (SMALL, LARGE, HUGE)
    few = offer("few", 0.5, 900, quota=1)
    assert useful_offers((few, SMALL, LARGE), host_memory=True) == (few, SMALL, LARGE), "a quota may run out"


def test_serving_keeps_the_cheapest_alone():
    places = (SMALL, offer("large", 2.0, 400, region="there"))
    assert group_offers(places)[0][0].offers == (SMALL,)
    assert group_offers(places, host_memory=True)[0][0].offers == places


def test_unstated_memory_of_a_rented_machine_is_what_its_gpus_have():
    silent = offer("silent", 1.5, None)
    assert useful_offers((SMALL, silent), host_memory=True) == (SMALL, silent)
    assert useful_offers((LARGE, replace(silent, price=replace(silent.price, usd_per_hour=9.0))), host_memory=True) == (
        LARGE,
    )


def test_more_host_memory_than_machines_have_is_a_warning_where_nobody_states_it():
    def plan(model: str):
        request = TrainRequest(
            model,
            job=TrainJob(tokens=10**8, seq_len=4096),
            hardware=HardwareFilter(owned="8xh100-sxm"),
            pins=TrainPins(offload="optimizer+parameters"),
        )
        return solve_training(request, load_model(model), load_catalog())

    large, small = plan("deepseek-r1"), plan("llama-3.1-8b")
    assert any("GiB of host memory in each machine" in line for line in large.warnings)
    assert not any("GiB of host memory in each machine" in line for line in small.warnings)

"""Laws every answer must obey, on the real estimators over a small catalog."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.request import HardwareFilter, Limits, Pins, ServeRequest, Workload
from planner.solver.ranking import rank
from planner.solver.serving import solve_serving
from planner.solver.study import make_study

LAW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
VLLM = Pins(engine="vllm")


def cost(request, model, catalog):
    """USD/h of the answer; infinite when there is none."""
    study = make_study(request, model, catalog)
    if not len(study.problem.rows):
        return float("inf")
    ranking = rank(study.problem)
    best = ranking.order(ranking.broken_count == 0)
    return float(ranking.cost[best[0]]) if len(best) else float("inf")


def request(rate=2.0, ttft=0.3, tpot=None, **kw):
    return ServeRequest(
        "llama-3.1-8b", workload=Workload(1024, 256, rate), limits=Limits(ttft_s=ttft, tpot_s=tpot), pins=VLLM, **kw
    )


@LAW
@given(st.floats(0.05, 1.0), st.floats(1.0, 4.0))
def test_a_looser_latency_never_costs_more(small_catalog, model_8b, ttft, factor):
    tight, loose = request(ttft=ttft), request(ttft=ttft * factor)
    assert cost(loose, model_8b, small_catalog) <= cost(tight, model_8b, small_catalog)


@LAW
@given(st.floats(0.1, 40.0), st.floats(1.0, 4.0))
def test_less_load_never_costs_more(small_catalog, model_8b, rate, factor):
    assert cost(request(rate=rate), model_8b, small_catalog) <= cost(
        request(rate=rate * factor), model_8b, small_catalog
    )


@LAW
@given(st.sampled_from(["l40s", "rtx-4090", "h100-sxm"]), st.floats(1.0, 2.0))
def test_more_memory_never_hurts(small_catalog, model_70b, gpu, factor):
    def bigger(offer):
        i = offer.instance
        return (
            replace(offer, instance=replace(i, gpu=replace(i.gpu, usable_gib=i.gpu.usable_gib * factor)))
            if i.gpu.name == gpu
            else offer
        )

    larger = replace(small_catalog, offers=tuple(bigger(o) for o in small_catalog.offers))
    asked = ServeRequest("llama-3.3-70b", workload=Workload(512, 128, 1.0), limits=Limits(ttft_s=1.0), pins=VLLM)
    assert cost(asked, model_70b, larger) <= cost(asked, model_70b, small_catalog)


@LAW
@given(st.integers(0, 10_000), st.floats(0.3, 1.0))
def test_a_cheaper_price_never_loses(small_catalog, model_8b, which, factor):
    at = which % len(small_catalog.offers)
    offer = small_catalog.offers[at]
    cheaper = replace(offer, price=replace(offer.price, usd_per_hour=offer.price.usd_per_hour * factor))
    reduced = replace(small_catalog, offers=(*small_catalog.offers[:at], cheaper, *small_catalog.offers[at + 1 :]))
    assert cost(request(), model_8b, reduced) <= cost(request(), model_8b, small_catalog)


@pytest.mark.parametrize("goal", ["cheapest", "fastest"])
def test_solver_and_ranking_agree_on_the_real_table(small_catalog, model_70b, goal):
    asked = ServeRequest("llama-3.3-70b", goal=goal, limits=Limits(ttft_s=0.5, budget_usd_per_hour=40.0))
    plan = solve_serving(asked, model_70b, small_catalog)
    study = make_study(asked, model_70b, small_catalog)
    ranking = rank(study.problem)
    best = ranking.order(ranking.broken_count == 0)[0]
    assert plan.status == "optimal"
    assert plan.cost.usd_per_hour == pytest.approx(ranking.cost[best] / 1e6)


def test_throughput_fills_the_budget(small_catalog, model_8b):
    asked = ServeRequest(
        "llama-3.1-8b", goal="throughput", limits=Limits(budget_usd_per_hour=10.0, tpot_s=0.05), pins=VLLM
    )
    plan = solve_serving(asked, model_8b, small_catalog)
    assert plan.status == "optimal"
    assert plan.cost.usd_per_hour <= 10.0
    assert plan.predicted["tpot_ms"].value <= 50.0
    less = solve_serving(replace(asked, limits=replace(asked.limits, budget_usd_per_hour=5.0)), model_8b, small_catalog)
    assert less.predicted["throughput_tokens_per_s"].value <= plan.predicted["throughput_tokens_per_s"].value


def test_owned_cards_are_not_exceeded(small_catalog, model_70b):
    asked = ServeRequest(
        "llama-3.3-70b",
        hardware=HardwareFilter(owned="2xrtx-4090"),
        limits=Limits(max_accuracy_loss_percent=5.0),
        workload=Workload(512, 128, 0.2),
    )
    plan = solve_serving(asked, model_70b, small_catalog)
    assert plan.status == "optimal"
    assert plan.deployment.gpus <= 2
    assert plan.deployment.offers[0].tier == "owned"


def test_an_infeasible_request_names_the_clash_and_a_change_that_works(small_catalog, model_70b):
    asked = ServeRequest(
        "llama-3.3-70b",
        limits=Limits(ttft_s=0.2, budget_usd_per_hour=1.0),
        workload=Workload(1024, 256, 2.0),
        pins=VLLM,
    )
    plan = solve_serving(asked, model_70b, small_catalog)
    assert plan.status == "infeasible"
    assert any("--budget" in line for line in plan.infeasible.core)
    budget = next(r for r in plan.infeasible.relaxations if r.limit == "--budget")
    solved = solve_serving(
        replace(asked, limits=replace(asked.limits, budget_usd_per_hour=budget.needed)), model_70b, small_catalog
    )
    assert solved.status == "optimal"
    just_less = replace(asked, limits=replace(asked.limits, budget_usd_per_hour=budget.needed - 0.02))
    assert solve_serving(just_less, model_70b, small_catalog).status == "infeasible"


def test_every_relaxation_offered_makes_it_feasible(small_catalog, model_70b):
    asked = ServeRequest("llama-3.3-70b", limits=Limits(ttft_s=0.02), workload=Workload(1024, 256, 2.0), pins=VLLM)
    plan = solve_serving(asked, model_70b, small_catalog)
    assert plan.status == "infeasible"
    assert plan.infeasible.relaxations
    for r in plan.infeasible.relaxations:
        assert "TTFT" in r.limit
        fixed = replace(asked, limits=replace(asked.limits, ttft_s=r.needed / 1e3))
        assert solve_serving(fixed, model_70b, small_catalog).status == "optimal"


def test_more_ranks_than_a_machine_has_gpus_is_the_reason(small_catalog, model_8b):
    asked = replace(request(), pins=Pins(engine="vllm", tensor_parallel=4), hardware=HardwareFilter(owned="2xrtx-4090"))
    plan = solve_serving(asked, model_8b, small_catalog)
    assert any("tensor_parallel 4 needs 4 GPUs in one machine" in line for line in plan.infeasible.core)


@pytest.mark.parametrize(("engine", "tokens"), [("tgi", 65536), ("vllm", 8192)])
def test_a_step_that_holds_whole_prompts_is_counted_in_memory(small_catalog, model_8b, engine, tokens):
    short, long = (
        solve_serving(
            replace(request(rate=0.1, ttft=None), pins=Pins(engine=engine, precision="bf16", max_model_len=length)),
            model_8b,
            small_catalog,
        )
        for length in (4096, 65536)
    )
    assert short.deployment.serve.max_num_batched_tokens == 8192
    assert long.deployment.serve.max_num_batched_tokens == tokens
    grown = long.memory.activations_gib / short.memory.activations_gib
    assert (grown > 4) == (engine == "tgi")

"""What a plan says about itself: no time below the memory roofline, close calls named, limits honest, time limits kept."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import replace

import pytest

import planner
from planner.errors import CatalogError, InputError, NoPlanError
from planner.estimator.time.steps import weight_read_s
from planner.hardware.catalog import load_catalog
from planner.models import load_model
from planner.plan import Range
from planner.request import HardwareFilter, Limits, Pins, ServeRequest, TrainJob, TrainLimits, TrainRequest, Workload
from planner.solver.assemble import close_calls, parts, predicted
from planner.solver.study import make_study


@pytest.mark.parametrize("model", ["8b", "70b", "openai/gpt-oss-20b"])
def test_no_prediction_is_below_reading_the_weights(model: str) -> None:
    spec = load_model(model)
    request = ServeRequest(model, hardware=HardwareFilter(gpus=("b200", "h100-sxm", "l40s", "a100-sxm-80")))
    study = make_study(request, spec, load_catalog())
    assert len(study.problem.rows) > 100
    for row in range(0, len(study.problem.rows), 97):
        _, shard, _, _ = parts(study, row)
        floor_ms = weight_read_s(spec, shard) * 1e3
        assert predicted(study, row, 1)["tpot_ms"].value >= floor_ms * (1 - 1e-6)
        assert predicted(study, row, 1)["tpot_ms"].low >= floor_ms * (1 - 1e-3) - 1e-3


def test_the_floor_is_weights_over_bandwidth() -> None:
    spec = load_model("70b")
    study = make_study(
        ServeRequest(
            "70b", hardware=HardwareFilter(owned="4xa100-sxm-80"), pins=Pins(precision="bf16", tensor_parallel=4)
        ),
        spec,
        load_catalog(),
    )
    _, shard, _, _ = parts(study, 0)
    weights = (spec.params_total - spec.vocab * spec.hidden) * 2
    assert weight_read_s(spec, shard) == pytest.approx(weights / 4 / (shard.gpu.bandwidth_gb_per_s * 1e9), rel=1e-3)


RANGES = {
    "ttft_ms": Range(150, 80, 400),
    "tpot_ms": Range(20, 15, 30),
    "e2e_ms": Range(5000, 4000, 7000),
    "capacity_requests_per_s": Range(2, 1.5, 3),
}


def test_close_calls_name_limits_inside_the_interval_and_only_those() -> None:
    tight = ServeRequest("8b", limits=Limits(ttft_s=0.2, tpot_s=0.04), workload=Workload(rate_per_s=1.8))
    lines = close_calls(tight, RANGES)
    assert len(lines) == 2
    assert "TTFT p95 <= 200 ms" in lines[0]
    assert "1.8 requests/s" in lines[1]
    assert close_calls(replace(tight, limits=Limits(ttft_s=0.5), workload=Workload(rate_per_s=1.0)), RANGES) == ()


def test_open_rate_throughput_never_exceeds_the_load() -> None:
    plan = planner.solve(ServeRequest("8b", workload=Workload(rate_per_s=2.0)))
    r = plan.predicted["throughput_tokens_per_s"]
    assert r.low <= r.value == r.high == pytest.approx(512.0)


def test_throughput_does_not_claim_that_more_machines_would_win() -> None:
    plan = planner.solve(ServeRequest("8b", goal="throughput", limits=Limits(max_gpus=4)))
    assert plan.binding[0].startswith("--max-gpus: goal throughput takes as many replicas")
    assert not any(line.startswith("--max-gpus: without") for line in plan.binding)


def test_training_keeps_its_time_limit() -> None:
    request = TrainRequest("70b", job=TrainJob(tokens=1e9), limits=TrainLimits(deadline_s=3600.0), time_limit_s=0.01)
    start = time.perf_counter()
    plan = planner.solve(request)
    assert time.perf_counter() - start < 20
    assert plan.status == "feasible", (
        "the second look, at the fastest hardware first, finds a run; nothing is proved of it"
    )
    tight = planner.solve(replace(request, limits=TrainLimits(deadline_s=600.0, budget_usd=600.0)))
    assert (tight.status, tight.solver.status) == ("infeasible", "UNKNOWN")
    assert tight.assumptions[0].startswith("NOT PROVED that there is no plan: the search stopped after 10.0 ms")


def test_estimate_says_what_is_missing() -> None:
    request = ServeRequest("70b", hardware=HardwareFilter(owned="1xrtx-4090"), pins=Pins(engine="vllm"))
    with pytest.raises(NoPlanError, match="does not fit: one request needs"):
        planner.estimate(request)


def test_memory_takes_the_sequences_that_fit() -> None:
    pins = Pins(engine="vllm", tensor_parallel=2)
    report = planner.memory(ServeRequest("70b", hardware=HardwareFilter(owned="2xh100-sxm"), pins=pins))
    assert report.fits


@pytest.mark.parametrize(
    "make",
    [
        lambda: ServeRequest("8b", goal="cheap"),  # type: ignore[arg-type]
        lambda: ServeRequest(8),  # type: ignore[arg-type]
        lambda: ServeRequest("8b", limits=None),  # type: ignore[arg-type]
        lambda: Limits(ttft_s="200ms"),  # type: ignore[arg-type]
        lambda: TrainJob(method="all"),  # type: ignore[arg-type]
        lambda: Workload(rate_per_s=True),
    ],
)
def test_wrong_types_are_one_line(make) -> None:
    with pytest.raises(InputError):
        make()


def test_special_files_are_not_read(tmp_path) -> None:
    fifo = tmp_path / "config.json"
    os.mkfifo(fifo)
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    with pytest.raises(InputError, match="not a regular file"):
        load_model(str(fifo))
    with pytest.raises(InputError, match="not a regular file"):
        planner.load_plan(fifo)


def test_a_fault_in_the_own_catalog_stops_solve(tmp_path) -> None:
    (tmp_path / "prices").mkdir()
    row = "p5.48xlarge,us-east-1,spot,99999,2026-11-01,own contract"
    (tmp_path / "prices" / "aws.csv").write_text(f"instance,region,tier,usd_per_hour,observed_on,source\n{row}\n")
    with pytest.raises(CatalogError, match="--catalog has a fault"):
        planner.solve(ServeRequest("8b", hardware=HardwareFilter(catalog_dirs=(str(tmp_path),))))


def test_sglang_is_told_a_share_that_leaves_room_for_what_lies_outside_it() -> None:
    hardware = HardwareFilter(owned="1xrtx-4090")
    seen = set()
    for seqs in (16, 1024):
        pins = Pins(engine="sglang", precision="bf16", max_num_seqs=seqs, max_model_len=2048)
        plan = planner.estimate(ServeRequest("google/gemma-2-9b-it", hardware=hardware, pins=pins))
        share = plan.deployment.serve.gpu_memory_utilization
        outside = plan.memory.activations_gib
        assert share * plan.memory.gpu_usable_gib + outside <= plan.memory.gpu_usable_gib
        assert plan.memory.headroom_gib >= 0.019 * plan.memory.gpu_usable_gib
        seen.add(share)
    assert min(seen) < 0.88


def test_a_framework_that_cannot_train_the_model_is_named() -> None:
    from planner.request import TrainPins

    hardware = HardwareFilter(owned="8xa100-sxm-80")
    job = TrainJob(tokens=1e8, seq_len=2048)
    plan = planner.solve(TrainRequest("opt-175b", job=job, hardware=hardware, pins=TrainPins(framework="torchtitan")))
    assert plan.infeasible is not None
    assert "torchtitan" in plan.infeasible.core[0]
    assert not any("(0x)" in line for line in plan.infeasible.core)


def test_an_own_gpu_without_fp8_is_planned_in_what_it_has(tmp_path) -> None:
    from planner.hardware.catalog import load_catalog as load

    h100 = load().gpus["h100-sxm"]
    text = (
        "my-card:\n  vendor: nvidia\n  architecture: hopper\n  compute_capability: 9.0\n  memory_gb: 80\n  usable_gib: 79.18\n"
        "  bandwidth_gb_per_s: 3350\n  pcie_gen: 5\n  peak_tflops: {fp32: 67, bf16: 989}\n"
        f"  default_link: {h100.default_link.name if hasattr(h100.default_link, 'name') else h100.default_link}\n  source: own\n"
    )
    (tmp_path / "gpus.yaml").write_text(text)
    hardware = HardwareFilter(owned="1xmy-card", catalog_dirs=(str(tmp_path),))
    plan = planner.solve(ServeRequest("8b", hardware=hardware))
    assert plan.deployment is not None
    assert plan.deployment.precision != "fp8"


def test_training_ranges_stay_below_the_peak() -> None:
    job = TrainJob(tokens=1e8, seq_len=4096)
    plan = planner.solve(TrainRequest("8b", job=job, hardware=HardwareFilter(owned="8xh100-sxm")))
    assert plan.predicted["mfu"].high <= max(0.9, plan.predicted["mfu"].value) + 1e-6
    assert plan.predicted["step_time_s"].low <= plan.predicted["step_time_s"].value


def test_a_load_nobody_carries_is_named_as_the_reason() -> None:
    plan = planner.solve(ServeRequest("8b", workload=Workload(rate_per_s=1e6), hardware=HardwareFilter(gpus=("l40s",))))
    assert plan.infeasible is not None
    (reason,) = plan.infeasible.core
    assert "1e+06 requests/s" in reason
    assert "512 replicas" in reason


def test_a_configuration_that_is_too_slow_says_what_it_carries() -> None:
    request = ServeRequest("8b", workload=Workload(rate_per_s=500.0), hardware=HardwareFilter(owned="1xl40s"))
    with pytest.raises(NoPlanError, match=r"cannot carry 500 requests/s: its capacity is \d"):
        planner.estimate(request)


def test_bitsandbytes_experts_of_tgi_are_not_planned() -> None:
    """Its SparseMoELayer refuses them (huggingface/text-generation-inference@0cd6ff7); dense models load."""
    pins = Pins(engine="tgi", precision="bnb-int8")
    for model, runs in (("qwen3-30b-a3b", False), ("8b", True)):
        request = ServeRequest(model, hardware=HardwareFilter(owned="1xh100-sxm"), pins=pins)
        study = make_study(request, load_model(model), load_catalog())
        assert bool(len(study.problem.rows)) is runs
        assert any("a mixture of experts does not run" in reason for reason in study.pruned) is not runs

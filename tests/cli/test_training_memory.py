"""Parts and total of training memory agree wherever they are shown; what is offloaded is told apart."""

from __future__ import annotations

import json

import pytest

from planner.cli.main import run
from planner.request import TrainJob
from planner.solver.train_assemble import parts_at_peak
from tests.training.helpers import hardware, memory, model, row

ON_GPU = ("weights_gib", "kv_cache_gib", "activations_gib", "runtime_gib", "gradients_gib", "optimizer_gib")
CASES = [
    ["--on", "1xh100-sxm", "--offload", "optimizer+parameters"],
    ["--on", "2xrtx-4090", "--offload", "optimizer+parameters", "--seq-len", "1024"],
    ["--on", "2xrtx-4090", "--offload", "optimizer", "--seq-len", "2048", "--framework", "deepspeed"],
    ["--on", "8xh100-sxm"],
    ["--on", "8xh100-sxm", "--framework", "megatron_bridge", "--pp", "4"],
    ["--on", "1xrtx-4090", "--method", "qlora", "--seq-len", "1024"],
]


def printed(capsys, command, options, *more):
    assert run([command, "--task", "train", "--model", "llama-3.1-8b", *options, *more]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("options", CASES)
def test_the_parts_of_a_prediction_sum_to_its_total(capsys, options):
    found = json.loads(printed(capsys, "estimate", options, "--tokens", "100M", "--json"))["memory"]
    assert sum(found[name] for name in ON_GPU) == pytest.approx(found["total_gib"], abs=0.006)


@pytest.mark.parametrize("options", CASES)
def test_the_rows_of_memory_sum_to_what_is_needed(capsys, options):
    found = json.loads(printed(capsys, "memory", options, "--json"))
    assert sum(gib for _, gib in found["parts"]) == pytest.approx(found["required_gib"], abs=0.006)


def test_what_is_offloaded_is_a_row_of_the_host(capsys):
    found = json.loads(printed(capsys, "memory", CASES[0], "--json"))
    assert dict(found["parts"])["weights"] == dict(found["parts"])["optimizer"] == 0
    ((name, gib),) = found["host_parts"]
    assert name == "weights, gradients and optimizer states"
    assert gib > 100
    table = printed(capsys, "memory", CASES[0])
    assert "in host memory" in table
    assert f"host memory {gib:,.0f} GiB per machine: {name}" in printed(
        capsys, "estimate", CASES[0], "--tokens", "100M"
    )


def test_a_peak_that_measurement_lowered_is_still_the_sum():
    found = memory(model("llama-3-8b"), TrainJob(seq_len=4096), hardware(), row("fsdp2", dp=8, zero=3))
    for factor in (1.3, 1.0, 0.97, 0.5):
        peak = factor * float(found.peak_bytes[0])
        parts = parts_at_peak(found, 0, peak)
        assert sum(parts.values()) == pytest.approx(peak)
        assert min(parts.values()) >= 0
    assert parts_at_peak(found, 0, float(found.peak_bytes[0]))["peak_weights"] == pytest.approx(
        found.peak_weights_bytes[0]
    )

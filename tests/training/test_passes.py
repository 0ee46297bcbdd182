"""Passes over gradients and states beside matrix products, first touch, and what a CPU process's heap keeps."""

from dataclasses import replace

import numpy as np
import pytest

from planner.engines.training import framework
from planner.estimator.memory.training import training_memory
from planner.estimator.time.train_passes import fresh_s, optimizer_s, reduce_passes_s, streamed_s
from planner.estimator.time.training import training_time
from planner.hardware.catalog import find_gpu, load_catalog
from planner.models.load import spec_from_config
from planner.request import TrainJob
from planner.space.hardware_classes import HardwareClass
from planner.space.train_rows import TrainRows
from planner.units import GIB
from tests.calibrate.cpu import TINY, folder
from tests.training.helpers import row

SMALL = TINY | {"hidden_size": 1024, "intermediate_size": 2560, "num_hidden_layers": 10, "vocab_size": 8192}
JOB = TrainJob(seq_len=256)
TOUCH_S_PER_GB = 0.5


@pytest.fixture
def machine(tmp_path):
    folder(tmp_path / "mine")
    catalog = load_catalog([str(tmp_path / "mine")])
    gpu = find_gpu("this-cpu", catalog)
    gpu = replace(gpu, measured=gpu.measured | {"first_touch_s_per_gb": TOUCH_S_PER_GB})
    return HardwareClass(gpu, 2, catalog.links[gpu.default_link], None, ())


def zeroed(rows):
    return replace(rows, framework=np.zeros(len(rows), dtype=np.int64))


def test_only_large_blocks_are_touched_for_the_first_time(machine):
    stack = framework("deepspeed").on(machine.gpu)
    assert float(fresh_s(stack, 1e9, 24 * 2**20)) == 0
    assert float(fresh_s(stack, 1e9, 64 * 2**20)) == pytest.approx(TOUCH_S_PER_GB)
    assert float(fresh_s(framework("deepspeed"), 1e9, 1e9)) == 0, "GPUs keep their blocks"


def test_passes_around_a_reduction(machine):
    stack, params = framework("deepspeed").on(machine.gpu), np.array([1e8, 1e8, 1e8])
    found = reduce_passes_s(machine.gpu, stack, np.array([0, 1, 3]), params, params)
    moved = float(streamed_s(machine.gpu, stack, 12 * 1e8))
    assert found == pytest.approx([0, moved + 4e8 * TOUCH_S_PER_GB / 1e9, moved + 2e8 * TOUCH_S_PER_GB / 1e9])


def test_an_optimizer_that_is_not_fused_takes_longer_on_a_cpu(machine):
    rows = zeroed(TrainRows.of([row("deepspeed", dp=2, zero=1)]))
    stack, owned = framework("deepspeed").on(machine.gpu), np.array([6e7])
    slow = optimizer_s(JOB, machine.gpu, stack, rows, owned)[0]
    fused = replace(stack, constants={**stack.constants, "step_moved_bytes": 0.0, "step_fresh_bytes": 0.0})
    quick = optimizer_s(JOB, machine.gpu, fused, rows, owned)[0]
    expected = float(streamed_s(machine.gpu, stack, 98 * 6e7)) + 14 * 6e7 * TOUCH_S_PER_GB / 1e9
    assert slow - quick == pytest.approx(expected)


def test_the_heap_keeps_what_backward_used(machine):
    spec, rows = spec_from_config(SMALL, name="small"), zeroed(TrainRows.of([row("deepspeed", dp=2, zero=1, mbs=2)]))
    got = training_memory(spec, JOB, machine, [framework("deepspeed")], rows)
    owned = spec.params_total / 2
    states = got.weights_bytes + got.gradients_bytes + got.optimizer_bytes
    assert got.heap_bytes[0] > 8 * owned, "two fp32 temporaries of AdamW and the activations"
    n = framework("deepspeed").on(machine.gpu).number
    context = (n("context_gib") + n("nccl_gib")) * GIB
    assert got.peak_bytes[0] > (states[0] + 8 * owned + got.activations_bytes[0]) + context
    on_gpu = replace(machine, gpu=replace(machine.gpu, vendor="nvidia", measured={}))
    assert training_memory(spec, JOB, on_gpu, [framework("deepspeed")], rows).heap_bytes[0] == 0


@pytest.mark.parametrize(("zero", "skips"), [(2, True), (3, False)])
def test_stage_3_of_deepspeed_recomputes_whole_layers(zero, skips, machine):
    spec = spec_from_config(SMALL, name="small")
    rows = zeroed(TrainRows.of([row("deepspeed", dp=2, zero=zero, k=1)]))
    stack = framework("deepspeed")
    whole = replace(stack, constants={**stack.constants, "early_stop": 0.0})
    time = [training_time(spec, JOB, machine, [s], rows).recompute_s[0] for s in (stack, whole)]
    assert (time[0] < time[1]) == skips

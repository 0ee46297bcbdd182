"""Memory of training: known totals of states, activation formulas, and how memory must move with the layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.engines.training import stacks
from planner.estimator.memory.train_activations import layer_kept_bytes
from planner.estimator.memory.train_host import quantised_model_bytes
from planner.estimator.memory.train_states import adapter_params, train_state_bytes
from planner.estimator.memory.train_worst import BACKWARD, LOAD, STEP
from planner.request import TrainJob
from tests.training.helpers import gpt, hardware, memory, model, row

LLAMA, SEQ = model("llama-3-8b"), 4096
JOB = TrainJob(seq_len=SEQ)


def per_param(framework: str, optimizer: str = "adamw", precision: str = "bf16") -> float:
    state = train_state_bytes(TrainJob(optimizer=optimizer, precision=precision), stacks()[framework])
    return state.weights + state.gradients + state.optimizer


@pytest.mark.parametrize(
    ("framework", "optimizer", "expected"),
    [
        ("fsdp2", "adamw", 16),
        ("fsdp2", "adamw-bf16", 8),
        ("torchtitan", "adamw", 16),
        ("megatron_bridge", "adamw", 18),
        ("deepspeed", "adamw", 20),
        ("deepspeed", "adamw-bf16", 12),
        ("ddp", "adamw", 16),
        ("ddp", "adamw-bf16", 8),
        ("ddp", "adamw-8bit", 6.0625),
        ("ddp", "adafactor", 4.01),
    ],
)
def test_bytes_of_states_per_parameter(framework, optimizer, expected):
    assert per_param(framework, optimizer) == pytest.approx(expected)


def test_deepspeed_stages_follow_its_code():
    """ZeRO-2 = 2P + 18P/n, ZeRO-3 = 18P/n (DeepSpeed runtime/zero at edaa7221)."""
    got = memory(LLAMA, JOB, hardware(), row("deepspeed", dp=8, zero=2), row("deepspeed", dp=8, zero=3))
    states = got.weights_bytes + got.gradients_bytes + got.optimizer_bytes
    params = LLAMA.params_total
    assert states == pytest.approx([2 * params + 18 * params / 8, 18 * params / 8], rel=0.01)


def test_megatron_distributed_optimizer_is_6_plus_12_over_d():
    got = memory(LLAMA, JOB, hardware(), row("megatron_bridge", dp=8, zero=1), row("megatron_bridge", dp=8, zero=0))
    states = (got.weights_bytes + got.gradients_bytes + got.optimizer_bytes) / LLAMA.params_total
    assert states == pytest.approx([6 + 12 / 8, 18], rel=0.01)


def test_pure_bf16_peaks_at_10_bytes_on_one_gpu_in_the_optimizer_step():
    """fms-acceleration benchmarks, PowerLM-3b full: steady 6.0 and peak 10.0 B/param on one GPU at small batches."""
    spec, job = gpt(2304, 40, 36, 49152), TrainJob(seq_len=512, optimizer="adamw-bf16")
    got = memory(spec, job, hardware(), row("fms_single"))
    alone = got.peak_bytes[0] - got.runtime_bytes[0]
    assert got.steady_bytes[0] / spec.params_total == pytest.approx(6, rel=0.01)
    assert alone / spec.params_total == pytest.approx(10, rel=0.01)
    assert got.worst_moment[0] == STEP


@pytest.mark.parametrize(("tensor", "expected"), [(1, 34), (8, 34 / 8)])
def test_gpt_layer_with_sequence_parallel_keeps_34_sbh_over_t_without_scores(tensor, expected):
    spec = gpt(12288, 1, 96)
    kept = layer_kept_bytes(
        spec.layers[0],
        12288,
        TrainJob(seq_len=2048),
        stacks()["megatron_bridge"],
        tokens=np.array([2048.0]),
        tensor=np.array([float(tensor)]),
    )
    fused = 8 + 4 + 4 + 16  # the fused kernel set has no dropout masks: 32 instead of 34
    assert kept[0] / (2048 * 12288) == pytest.approx(expected * fused / 34)


@pytest.mark.parametrize("tensor", [1, 8])
def test_gpt_layer_without_flash_follows_korthikanti_equation_2(tensor):
    """s b h (10 + 24/t + 5 a s/(h t)), arXiv:2205.05198; 175B: a = 96, h = 12288, s = 2048."""
    spec = gpt(12288, 1, 96)
    kept = layer_kept_bytes(
        spec.layers[0],
        12288,
        TrainJob(seq_len=2048),
        stacks()["bigscience"],
        tokens=np.array([2048.0]),
        tensor=np.array([float(tensor)]),
    )
    assert kept[0] / (2048 * 12288) == pytest.approx(10 + 24 / tensor + 5 * 96 * 2048 / (12288 * tensor), rel=1e-6)


@pytest.mark.parametrize(("stack", "copies"), [("torchtitan", 41), ("fsdp2", 49), ("fms", 56), ("ddp", 59)])
def test_llama_8b_layer_keeps_41_fused_49_eager_and_59_under_autocast(stack, copies):
    kept = layer_kept_bytes(LLAMA.layers[0], 4096, JOB, stacks()[stack], tokens=np.array([1.0]), tensor=np.array([1.0]))
    assert kept[0] / 4096 == pytest.approx(copies, rel=0.02)


def test_torchtune_table_of_a_3b_model():
    """pytorch/torchtune README, Llama3.2-3B, batch 2 x 4096 packed, all bf16: 51.0 GiB compiled, 42.9 with chunked
    loss, 24.9 with checkpointing."""
    spec = model("llama-3.2-3b")
    plain, chunked = (TrainJob(seq_len=4096, optimizer="adamw-bf16", chunked_loss=c) for c in (False, True))
    got = [memory(spec, plain, hardware(), row("torchtune", mbs=2, k=0))]
    got += [memory(spec, chunked, hardware(), row("torchtune", mbs=2, k=k)) for k in (0, 1)]
    assert [(m.peak_bytes[0] - m.runtime_bytes[0]) / 2**30 for m in got] == pytest.approx([51.0, 42.9, 24.9], rel=0.06)


def test_bloom_fits_as_reported():
    """bigscience chronicles-prequel: 176B TP4 PP12 DP8: 59 GB at micro-batch 2 and 73 GB at 4 in nvidia-smi, which
    counts the allocator's cache."""
    spec, job = gpt(14336, 70, 112, 250880), TrainJob(seq_len=2048)
    rows = [row("bigscience", tp=4, pp=12, dp=8, zero=1, mbs=b, ga=2048 // 8 // b) for b in (2, 4)]
    got = memory(spec, job, hardware(), *rows)
    assert got.fits.all()
    assert got.peak_bytes / 1e9 == pytest.approx([59, 73], rel=0.18)


def test_lora_trains_few_parameters_and_freezes_16_bit_weights():
    job = TrainJob(method="lora", lora_rank=16, lora_targets=("attention",))
    per_layer = adapter_params(LLAMA, job, LLAMA.layers[0])
    assert per_layer == 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    got = memory(LLAMA, job, hardware(), row("ddp"))
    assert got.weights_bytes[0] / 2**30 == pytest.approx(LLAMA.params_total * 2 / 2**30, rel=0.01)
    assert got.optimizer_bytes[0] == pytest.approx(32 * per_layer * 8)


def test_qlora_shrinks_the_base_to_about_half_a_byte():
    job = TrainJob(method="qlora")
    got = memory(model("llama-2-70b"), job, hardware(), row("ddp"))
    assert got.weights_bytes[0] / 2**30 == pytest.approx(
        34.6, rel=0.03
    )  # 34.63 GiB loaded (fms-acceleration, 70B 4-bit)


def test_chunked_loss_removes_the_logits():
    whole, chunked = (
        memory(LLAMA, TrainJob(seq_len=SEQ, chunked_loss=c), hardware(), row("fsdp2", dp=8, zero=3, mbs=4))
        for c in (False, True)
    )
    assert chunked.logits_bytes[0] < 0.3 * whole.logits_bytes[0]
    assert chunked.peak_bytes[0] < whole.peak_bytes[0]


def test_offload_moves_states_to_host_memory():
    job = TrainJob(seq_len=SEQ)
    kinds = ("none", "optimizer", "optimizer+parameters")
    got = memory(LLAMA, job, hardware(), *(row("deepspeed", dp=8, zero=3, offload=kind) for kind in kinds))
    assert got.optimizer_bytes[1] == 0
    assert got.weights_bytes[2] == 0
    assert (np.diff(got.peak_bytes) < 0).all()
    assert (np.diff(got.host_ram_bytes) > 0).all()


every_layout = st.tuples(
    st.sampled_from(["deepspeed", "fsdp2", "torchtitan", "megatron_bridge", "ddp"]),
    st.sampled_from([1, 2, 8]),
    st.integers(0, 3),
    st.sampled_from([1, 4]),
    st.sampled_from([1, 4]),
    st.sampled_from([0, 1, 4]),
    st.sampled_from(["none", "optimizer", "optimizer+parameters"]),
    st.sampled_from([1, 4]),
)


@given(every_layout, st.sampled_from(["full", "lora", "qlora"]), st.booleans())
def test_the_parts_are_the_peak(layout, method, chunked):
    """Weights, gradients, optimizer, activations, logits, buffers and runtime that are there are the peak, in every moment."""
    framework, dp, zero, mbs, ga, k, offload, pp = layout
    job = TrainJob(method=method, seq_len=1024, chunked_loss=chunked)
    one = row(framework, dp=dp, zero=zero, mbs=mbs, ga=ga, k=k, offload=offload, pp=pp)
    got = memory(LLAMA, job, hardware(), one)
    parts = (got.peak_weights_bytes, got.peak_gradients_bytes, got.peak_optimizer_bytes, got.activations_bytes, got.logits_bytes,
             got.buffers_bytes, got.runtime_bytes)  # fmt: skip
    assert min(float(part[0]) for part in parts) >= 0
    assert sum(float(part[0]) for part in parts) == pytest.approx(got.peak_bytes[0], rel=1e-9)
    assert got.peak_gradients_bytes[0] <= got.gradients_bytes[0]
    if got.worst_moment[0] == LOAD:
        assert got.peak_gradients_bytes[0] == got.peak_optimizer_bytes[0] == got.activations_bytes[0] == 0
    else:
        assert got.peak_weights_bytes[0] == got.weights_bytes[0]


def test_paged_moments_are_host_memory():
    got = memory(LLAMA, TrainJob(seq_len=512, optimizer="paged-adamw-8bit"), hardware(), row("ddp"))
    plain = memory(LLAMA, TrainJob(seq_len=512, optimizer="adamw-8bit"), hardware(), row("ddp"))
    assert got.optimizer_bytes[0] < plain.optimizer_bytes[0]
    assert got.host_ram_bytes[0] >= 2 * LLAMA.params_total


def test_experts_are_spread_by_expert_parallel():
    spec, job = model("qwen3-30b-a3b"), TrainJob(seq_len=SEQ)
    got = memory(
        spec,
        job,
        hardware("h100-sxm"),
        row("megatron_bridge", dp=8, zero=1, k=1),
        row("megatron_bridge", dp=8, ep=8, zero=1, k=1),
    )
    assert got.weights_bytes[1] < 0.3 * got.weights_bytes[0]


degrees = st.sampled_from([1, 2, 4, 8])


@given(
    st.sampled_from(["deepspeed", "fsdp2", "torchtitan", "megatron_bridge"]),
    degrees,
    degrees,
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_more_data_parallel_ranks_never_need_more(framework, dp, mbs, zero, accumulation):
    zero = (
        min(zero, 1)
        if framework == "megatron_bridge"
        else (max(2, zero) if framework in ("fsdp2", "torchtitan") else zero)
    )
    job, hw = TrainJob(seq_len=1024), hardware()
    got = memory(LLAMA, job, hw, *(row(framework, dp=d, zero=zero, mbs=mbs, ga=accumulation) for d in (2 * dp, 4 * dp)))
    states = got.weights_bytes + got.gradients_bytes + got.optimizer_bytes
    assert states[1] <= states[0] * (1 + 1e-9)
    assert got.peak_bytes[1] <= got.peak_bytes[0] * (1 + 1e-9)


@given(degrees, st.integers(1, 8))
def test_a_higher_zero_stage_never_holds_more_states(dp, mbs):
    got = memory(
        LLAMA, TrainJob(seq_len=1024), hardware(), *(row("deepspeed", dp=2 * dp, zero=z, mbs=mbs) for z in range(4))
    )
    states = got.weights_bytes + got.gradients_bytes + got.optimizer_bytes
    assert (np.diff(states) <= 1e-3).all()


@given(st.integers(1, 32), degrees)
def test_intervals_store_fewer_checkpoints_but_hold_more_live_layers(k, mbs):
    spec = model("llama-3-8b", vocab=256)  # no logits to speak of: layers are what is there at the worst moment
    got = memory(spec, JOB, hardware(), *(row("fsdp2", dp=8, zero=3, mbs=mbs, ga=2, k=x) for x in (0, 1, k)))
    assert got.activations_bytes[1] < got.activations_bytes[0]
    kept = layer_kept_bytes(
        LLAMA.layers[0], 4096, JOB, stacks()["fsdp2"], tokens=np.array([mbs * SEQ * 1.0]), tensor=np.array([1.0])
    )[0]
    live, stored = stacks()["fsdp2"].number("live_layers"), np.ceil(32 / k) * 2 * 4096 * mbs * SEQ
    assert got.activations_bytes[2] == pytest.approx(stored + (k + live) * kept)


def test_the_first_pipeline_stage_holds_most_micro_batches():
    spec, job = gpt(4096, 32, 32), TrainJob(seq_len=2048)
    few, many = (
        memory(spec, job, hardware(), row("megatron_bridge", pp=8, zero=0, ga=4, k=0)),
        memory(spec, job, hardware(), row("megatron_bridge", pp=8, zero=0, ga=64, k=0)),
    )
    assert many.activations_bytes[0] / few.activations_bytes[0] == pytest.approx(
        2, rel=0.05
    )  # min(p - stage, m): 8 against 4
    assert many.worst_moment[0] == BACKWARD


def test_rows_of_several_frameworks_are_independent():
    rows = [
        row("ddp"),
        row("fsdp2", dp=8, zero=3),
        row("deepspeed", dp=4, zero=2),
        row("megatron_bridge", tp=2, pp=2, dp=2, zero=1, ga=4),
    ]
    together = memory(LLAMA, JOB, hardware(), *rows)
    assert together.peak_bytes == pytest.approx([memory(LLAMA, JOB, hardware(), r).peak_bytes[0] for r in rows])


def test_fsdp2_qlora_loads_the_whole_4_bit_model_in_every_process():
    spec, job = model("llama-3-70b"), TrainJob(method="qlora", seq_len=2048)
    hw = hardware("a100-sxm-80")
    got = memory(spec, job, hw, row("fsdp2", dp=8, zero=3), row("fsdp2", dp=2, zero=3), row("deepspeed", dp=8, zero=2))
    each = quantised_model_bytes(spec, job)
    assert each == pytest.approx(40e9, rel=0.06)  # 70e9 x 0.52 B and 2.1e9 of embedding and head x 2 B
    assert got.host_ram_bytes[:2].tolist() == pytest.approx([8 * each, 2 * each])
    assert got.host_ram_bytes[2] < 8 * each


def test_frozen_weights_keep_less():
    """Counted on fake tensors: 36, 43 and 45 s b h with adapters on attention, feed-forward and both of Llama-3.1-8B."""
    for targets, copies in ((("attention",), 36), (("mlp",), 43), (("attention", "mlp"), 45)):
        job = TrainJob(method="lora", seq_len=4096, lora_targets=targets)
        got = layer_kept_bytes(
            LLAMA.layers[0], 4096, job, stacks()["fsdp2"], tokens=np.array([1.0]), tensor=np.array([1.0])
        )
        assert got[0] / 4096 == pytest.approx(copies, rel=0.01)


def test_deepspeed_leaves_an_untied_embedding_whole():
    """AutoTP, run on two ranks: the head is cut, the embedding is not."""
    got = [memory(LLAMA, JOB, hardware(), row("deepspeed", zero=1, tp=t, dp=8 // t)).weights_bytes[0] for t in (1, 4)]
    embedding = 2 * LLAMA.vocab * LLAMA.hidden
    assert got[1] == pytest.approx((got[0] - embedding) / 4 + embedding, rel=0.001)


def test_a_checkpoint_over_many_layers_gathers_them_all_under_fsdp2():
    got = [memory(LLAMA, JOB, hardware(), row("fsdp2", zero=3, dp=8, k=k)).peak_bytes[0] for k in (2, 8)]
    layer = 2 * LLAMA.layers[0].params(4096)
    assert got[1] - got[0] > 5 * layer


def test_fsdp_stage_two_keeps_a_whole_copy_of_one_rank_too():
    """One rank gathers into a buffer as well: a 70B model whose parameters wait in host memory would fit without it (counted on fake
    tensors: 131 GiB of unsharded weights)."""
    spec = model("llama-3-70b")
    two, three = (
        memory(spec, JOB, hardware(), row("fsdp2", zero=z, offload="optimizer+parameters", k=1)).peak_bytes[0]
        for z in (2, 3)
    )
    assert two - three > 0.9 * 2 * spec.params_total

"""What public scripts state beyond a row: lengths of samples, tuners, techniques; and memory as processes show it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.engines.training import stacks
from planner.estimator.memory.train_activations import layer_kept_bytes, logits_bytes
from planner.estimator.memory.train_reserved import process_memory
from planner.estimator.memory.training import training_memory
from planner.request import TrainJob
from planner.space.train_rows import TrainRows
from planner.units import GIB
from planner.validate.accuracy_training import range_kind, replay, replay_memory_training
from planner.validate.training_cases import read_case, read_memory_case
from planner.validate.training_scripts import Script, adapter_rank, samples_of, script_of
from tests.training.helpers import CATALOG, hardware, model
from tests.training.test_accuracy import FOUNDRY, memory_row

LLAMA = model("llama-3.1-8b")
SWIFT = FOUNDRY | {  # modelscope/ms-swift examples/train/tuners/lora/train.sh: 17.2 GiB
    "model": "Qwen2.5-7B",
    "params_b": "7.616",
    "layers": "28",
    "hidden": "3584",
    "ffn": "18944",
    "heads": "28",
    "kv_heads": "4",
    "vocab": "152064",
    "seq_len": "",
    "n_gpus": "1",
    "dp": "1",
    "zero_or_fsdp_stage": "none",
    "micro_batch": "1",
    "global_batch": "mbs*16*dp",
    "recompute": "full",
    "precision": "bf16",
    "optimizer": "AdamW",
    "metric": "peak_mem_gb_per_gpu",
    "value": "17.2",
    "source": "modelscope/ms-swift@3602360a examples/train/tuners/lora/train.sh header comment",
    "task": "lora",
    "notes": '"# 17.2GiB"; packing=false; lora_rank=8; liger=;',
}


def swift(path: str, **change: str) -> dict[str, str]:
    return SWIFT | {"source": f"modelscope/ms-swift@3602360a {path} header comment", **change}


def peak(spec, job, stack, layout, **constants):
    framework = stacks()[stack]
    framework = replace(framework, constants={**framework.constants, **constants})
    return (
        framework,
        TrainRows.of([layout]),
        training_memory(spec, job, hardware(), [framework], TrainRows.of([layout])),
    )


def test_a_padded_batch_is_as_long_as_the_longest_sample_of_the_scripts_dataset():
    assert samples_of(SWIFT, None).longest == 131
    assert samples_of(swift("examples/train/lora_sft.sh"), 2048).longest == 550
    assert samples_of(swift("examples/train/lora_sft.sh"), 256).longest == 256  # the script's limit
    assert samples_of(swift("examples/train/padding_free/sft.sh"), 8192).longest == 8192
    assert "without padding" in samples_of({**SWIFT, "notes": '"# padding_free: 4 * 44GiB"'}, 8192)
    assert "lengths" in samples_of({**SWIFT, "source": "nobody/nothing@1 train.sh"}, None)
    assert script_of({**SWIFT, "source": "nobody/nothing@1 train.sh"}) == Script()


def test_public_figures_of_one_gpu_fine_tuning():
    """ms-swift, Qwen2.5-7B: 17.2 GiB LoRA, 76 all weights in bf16, 25.4 four new layers, 29 two layers and the ends."""
    rows = [
        SWIFT,
        swift("examples/train/full/train.sh", task="full-ft"),
        swift("examples/train/tuners/llamapro/train.sh", task="llamapro"),
        swift("examples/train/tuners/lisa/train.sh", task="full-ft"),
    ]
    got = replay(rows)
    assert [p.predicted for p in got] == pytest.approx([17.2, 76, 25.4, 29], rel=0.05)
    assert all("longest sample" in p.assumed for p in got)
    assert got[0].high / got[0].predicted > 1.5  # an assumed fact widens the range


def test_a_time_without_lengths_of_samples_stays_skipped():
    assert "lengths" in replay([{**SWIFT, "metric": "step_time_s"}])[0].skipped


@pytest.mark.parametrize("task", ["adalora", "boft", "bone", "dora", "vera"])
def test_adapters_that_are_like_lora(task):
    case = read_case({**SWIFT, "task": task, "notes": "packing=false"}, CATALOG)
    assert (case.job.method, case.job.lora_rank) == ("lora", adapter_rank(task))


def test_a_run_out_of_memory_has_a_prediction_and_no_error():
    got = replay([{**SWIFT, "value": "OOM"}])[0]
    assert got.predicted is not None


def test_encoder_decoders_and_experts_have_their_parameters():
    sizes = {"bigscience/T0_3B": 2.85e9, "bigscience/mt0-xxl": 12.9e9}
    for name, params in sizes.items():
        row = {**SWIFT, "model": name, "layers": "", "source": "huggingface/peft@5d602fdb README.md L93-95"}
        assert read_case(row, CATALOG).model.params_total == pytest.approx(params, rel=0.01)
    experts = memory_row(model="ibm-research/moe-7b-1b-active-shared-experts", max_model_len="4096")
    assert read_memory_case(experts, CATALOG).model.params_total == pytest.approx(25.49e9 / 4, rel=0.002)


def test_fp32_lora_of_the_peft_examples():
    """huggingface/peft README: T0_3B on an A100, 47.14 GB all weights, 14.4 with LoRA."""
    base = {**SWIFT, "model": "bigscience/T0_3B", "precision": "not stated", "micro_batch": "", "notes": "raft"}
    base |= {"source": "huggingface/peft@5d602fdb README.md L93-95", "recompute": "not stated"}
    got = replay([{**base, "task": "full-ft"}, base])
    assert [p.predicted for p in got] == pytest.approx([47.14, 14.4], rel=0.05)


def test_a_reading_of_a_failed_run_ends_where_the_gpu_does():
    row = memory_row(outcome="oom", metric="nvml_used_mib", batch="64", max_model_len="4096")
    row["note"] = "framework=none grad-checkpointing flash-attn2 ga=1. empty throughput = run failed"
    got = replay_memory_training([row])[0]
    assert got.predicted == pytest.approx(CATALOG.gpus["a100-sxm-80"].usable_gib * 1024)
    assert range_kind(read_memory_case(row, CATALOG)) == "memory_failed"
    for lacking in ("batch", "max_model_len"):
        assert "not stated" in replay_memory_training([{**row, lacking: ""}])[0].skipped


def test_reserved_memory_by_its_parts():
    job = TrainJob(method="lora", seq_len=4096, lora_targets=("attention",))
    framework, rows, memory = peak(LLAMA, job, "hf_trainer", (0, 1, 1, 1, 1, 1, 0, 2, 1, 1, 0))
    got, n = process_memory(LLAMA, job, framework, rows, memory), framework.number
    moving = got.allocated - memory.steady_bytes
    head = n("cached_head_copies") * 2 * LLAMA.vocab * LLAMA.hidden
    assert got.reserved - got.allocated == pytest.approx((n("cached_share") + n("cached_logits_share")) * moving + head)
    assert got.process - got.reserved == pytest.approx(n("context_gib") * GIB)
    chunked = process_memory(LLAMA, replace(job, chunked_loss=True), framework, rows, memory)
    assert got.reserved - chunked.reserved == pytest.approx(n("cached_logits_share") * moving)
    full = process_memory(LLAMA, job, framework, rows, replace(memory, usable_bytes=got.allocated))
    assert full.reserved == pytest.approx(got.allocated)


def test_an_optimizer_in_backward_holds_the_gradients_of_one_layer():
    job, layout = TrainJob(seq_len=2048, optimizer="adamw-bf16", chunked_loss=True), (0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0)
    _, _, plain = peak(LLAMA, job, "torchtune", layout)
    _, _, fused = peak(LLAMA, job, "torchtune", layout, gradients_in_backward=1.0)
    largest = max(LLAMA.layers[0].params(LLAMA.hidden), LLAMA.vocab * LLAMA.hidden)
    assert plain.gradients_bytes[0] == pytest.approx(2 * LLAMA.params_total)
    assert fused.gradients_bytes[0] == pytest.approx(2 * largest, rel=0.01)


def test_offloaded_activations_leave_a_few_checkpoints():
    # so many samples that the peak is not the optimizer's step
    job, layout = TrainJob(seq_len=4096), (0, 1, 1, 1, 1, 1, 0, 16, 1, 1, 0)
    (_, _, kept), (_, _, moved) = (peak(LLAMA, job, "torchtune", layout, offloaded_stash=s) for s in (0.0, 5.0))
    assert kept.activations_bytes[0] - moved.activations_bytes[0] == pytest.approx((32 - 5) * 16 * 4096 * 2 * 4096)


def test_a_scale_on_outputs_keeps_every_matrixs_output():
    plain = stacks()["litgpt"]
    scaled = replace(plain, constants={**plain.constants, "matrix_output_bytes": 2.0})
    job, one = TrainJob(method="lora"), np.array([1.0])
    kept = [layer_kept_bytes(LLAMA.layers[0], 4096, job, f, tokens=one, tensor=one)[0] for f in (plain, scaled)]
    assert kept[1] - kept[0] == 2 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    logits = [logits_bytes(LLAMA, job, f, one, one)[0] for f in (plain, scaled)]
    assert logits[1] - logits[0] == pytest.approx(2 * LLAMA.vocab)


def test_a_flat_parameter_has_a_gradient_for_frozen_weights_too():
    """Lightning-AI/litgpt resource tables: LoRA of Llama-2-7B on two A100, FSDP: 22.2 GB at micro-batch 1."""
    spec, layout = model("llama-2-7b"), (0, 1, 1, 1, 2, 1, 3, 1, 64, 1, 0)
    job = TrainJob(method="lora", seq_len=1304, optimizer="adamw-bf16", lora_rank=8)
    _, _, flat = peak(spec, job, "litgpt_fsdp", layout)
    assert (flat.peak_bytes[0] - flat.runtime_bytes[0]) / 1e9 == pytest.approx(22.18, rel=0.05)
    _, _, apart = peak(spec, job, "litgpt_fsdp", layout, flat_gradients=0.0)
    assert flat.buffers_bytes[0] - apart.buffers_bytes[0] == pytest.approx(2 * spec.params_total, rel=0.01)


def test_offloaded_weights_are_loaded_into_host_memory():
    job, on_host = TrainJob(seq_len=2048, optimizer="adamw-bf16"), (0, 1, 1, 1, 8, 1, 3, 1, 1, 1, 2)
    spec = model("llama-3.1-70b")
    _, _, got = peak(spec, job, "fsdp2", on_host)
    assert got.peak_bytes[0] < 2 * spec.params_total / 8 + 12 * GIB
    assert got.worst_moment[0] != 0


def test_frozen_weights_in_fp32():
    job, layout = TrainJob(method="lora"), (0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0)
    (_, _, half), (_, _, whole) = (peak(LLAMA, job, "ddp", layout, frozen_bytes=b) for b in (2.0, 4.0))
    assert whole.weights_bytes[0] - half.weights_bytes[0] == pytest.approx(2 * LLAMA.params_total, rel=1e-3)


def test_experts_of_scattermoe_are_cut_by_expert_parallelism_alone():
    """fms-acceleration, 7B with 1B active on A100: 58,932 MiB on four GPUs with two expert groups, as on two GPUs."""
    row = memory_row(
        model="ibm-research/moe-7b-1b-active-shared-experts", quant="full bfloat16", n_gpus="4", batch="8", metric="nvml_used_mib",
        max_model_len="4096", note="framework=moe-scattermoe-granite-ep2 grad-checkpointing flash-attn2 ga=4. 277 tok/sample",
        source="foundation-model-stack/fms-acceleration:scripts/benchmarks/refs/a100_80gb_moe.csv",
    )  # fmt: skip
    four, two = replay_memory_training([row, {**row, "n_gpus": "2", "note": row["note"].replace("ga=4", "ga=8")}])
    assert four.predicted == pytest.approx(58932, rel=0.1)
    assert two.predicted == pytest.approx(58769, rel=0.1)
    free = {**row, "note": row["note"].replace("ep2", "ep2-padding-free")}
    assert replay_memory_training([free])[0].predicted < four.predicted
    assert "rate" in replay_memory_training([{**row, "metric": "tok_s_per_gpu"}])[0].skipped


def test_models_and_gpus_by_the_names_that_planner_knows():
    row = {**SWIFT, "model": "qwen3-8b", "layers": "", "gpu": "l40s", "params_b": ""}
    case = read_case(row, CATALOG)
    assert case.model.params_total == pytest.approx(8.19e9, rel=0.01)
    assert case.hw.gpu.name == "l40s"

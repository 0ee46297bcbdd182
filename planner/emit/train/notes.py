"""LAUNCH.md of a training plan: what was planned, how to start, watch and resume it, what to do when memory runs out."""

from __future__ import annotations

import shlex

from planner.emit.notes import figures, not_written, table_row
from planner.emit.text import HEADER
from planner.emit.train.layout import TrainLayout, facts
from planner.emit.train.settings import then_try

HUGGING_FACE = ("deepspeed", "fsdp2")


def launch_md(laid: TrainLayout, names: list[str], skipped: dict[str, str]) -> str:
    """The notes. names: the files written beside it; skipped: target -> reason."""
    return "\n".join(
        [
            f"<!-- {HEADER} -->",
            f"# {laid.label}",
            "",
            "| | |",
            "|---|---|",
            *_rows(laid),
            "",
            "## Start",
            "",
            *_start(laid, names),
            "",
            "## Watch",
            "",
            *_watch(laid),
            "",
            "## When memory runs out",
            "",
            *_memory(laid),
            "",
            "## Know",
            "",
            *_know(laid),
            "",
            *not_written(skipped),
        ]
    )


def _rows(laid: TrainLayout) -> list[str]:
    dep, train, plan = laid.deployment, laid.train, laid.plan
    rows = [
        table_row("model", f"`{laid.model}` ({plan.model.params_total / 1e9:.1f} B parameters)"),
        table_row("method", train.method + (f", rank {train.lora_rank}" if train.method != "full" else "")),
        table_row("framework", f"{laid.title} {dep.engine_version}, {dep.precision}, optimizer {train.optimizer}"),
        table_row(
            "parallel",
            f"data {dep.data_parallel}, tensor {dep.tensor_parallel}, pipeline {dep.pipeline_parallel}, "
            f"context {dep.context_parallel}, expert {dep.expert_parallel}, ZeRO {train.zero_stage}",
        ),
        table_row(
            "batch",
            f"{train.global_batch_size} sequences of {train.seq_len} tokens = micro-batch {train.micro_batch_size} x "
            f"accumulation {train.gradient_accumulation_steps} x data {dep.data_parallel}",
        ),
        table_row("steps", f"{train.steps} ({train.steps * train.global_batch_size * train.seq_len:.3g} tokens)"),
        table_row("memory", f"checkpoint interval {train.checkpoint_interval}, offload {train.offload}"),
    ]
    if train.layers_per_stage:
        rows.append(table_row("layers per stage", ", ".join(map(str, train.layers_per_stage))))
    for offer in dep.offers:
        price = "your own" if laid.owned else f"{offer.usd_per_hour:.2f} USD/h each, seen {offer.observed_at}"
        what = f"{offer.count}x {offer.instance_type} ({offer.gpus_per_instance}x {offer.gpu})"
        rows.append(table_row("machines", f"{what}, {offer.provider} {offer.region} {offer.tier}, {price}"))
    known = plan.cost is not None and plan.cost.usd_total is not None
    money = f"{plan.cost.usd_per_hour:.2f} USD/h, {plan.cost.usd_total:.2f} USD in all" if plan.cost and known else ""
    return [*rows, *figures(plan, money)]


def _start(laid: TrainLayout, names: list[str]) -> list[str]:
    data = "/data/corpus_text_document" if laid.engine == "megatron_bridge" else "corpus.jsonl"
    packages = " ".join(shlex.quote(p) for p in laid.packages)
    lines = [f"* Packages: `python3 -m pip install {packages}` (or INSTALL=1)."]
    if laid.gated:
        lines.append("* The hub asks for an accepted licence: accept it, then `export HF_TOKEN=...`.")
    if laid.engine == "megatron_bridge":
        lines.append(
            "* DATASET is the prefix of a .bin/.idx pair made with Megatron-LM's tools/preprocess_data.py; "
            "`mock` trains on random tokens."
        )
    several = laid.machines > 1
    where = "MACHINE_INDEX=0 HOSTS='addr0 addr1 ...' " if several else ""
    then = f", and so on with MACHINE_INDEX up to {laid.machines - 1} on the other machines" if several else ""
    lines.append(f"* `{where}DATASET={data} bash launch.sh`{then}")
    how = {
        "kubernetes.yaml": "`kubectl apply -f kubernetes.yaml`",
        "train.slurm": "`DATASET=... sbatch train.slurm`",
        "skypilot.yaml": "`sky launch skypilot.yaml --env HF_TOKEN --env DATASET=...`",
        "hostfile.example": "copy to `hostfile`, put in the addresses, run launch.sh once: DeepSpeed starts the rest by ssh",
        "accelerate.yaml": "read by launch.sh; LAUNCHER=torchrun does without it",
    }
    lines += [f"* `{name}`: {how[name]}" for name in names if name in how]
    if laid.engine in HUGGING_FACE:
        lines.append("* `EXTRA_ARGS='--learning-rate 1e-5 --steps 200'` changes what the planner does not decide.")
        lines.append("* A rehearsal without GPUs: `EXTRA_ARGS=--cpu` with a tiny MODEL, gloo instead of NCCL.")
    return lines


def _watch(laid: TrainLayout) -> list[str]:
    if laid.engine not in HUGGING_FACE:
        return ["* The framework logs step time, tokens/s and memory; TensorBoard files are in OUTPUT_DIR."]
    return [
        "* `OUTPUT_DIR/metrics.jsonl`: one line a step with loss, step_time_s, tokens_per_s (of all GPUs), "
        "tokens_per_s_per_gpu, and the peak memory of the fullest rank.",
        "* The first line says what really runs (wrapper, world size, data parallel, global batch); anything other than "
        "the plan ends the run before its first step.",
        "* Run launch.sh again with the same OUTPUT_DIR to go on from the newest checkpoint; `--fresh` starts over. "
        "The trained model is in OUTPUT_DIR/final.",
    ]


def _memory(laid: TrainLayout) -> list[str]:
    if laid.engine not in HUGGING_FACE:
        return [f"* Then {then_try(laid)}."]
    return [
        "* The run ends with exit code 12 on that rank and names the next plan. In order:",
        "  1. half the micro-batch, twice the accumulation: `MICRO_BATCH_SIZE=... GRADIENT_ACCUMULATION_STEPS=...`;",
        "  2. a checkpoint at every layer: `CHECKPOINT_INTERVAL=1`;",
        f"  3. {then_try(laid)}.",
        "* `launch.sh` takes those variables; the global batch stays as planned.",
    ]


def _know(laid: TrainLayout) -> list[str]:
    train, interval = laid.train, laid.train.checkpoint_interval
    lines = [
        f"* Learning rate {laid.learning_rate:g}, {facts()['training']['warmup_share']:.0%} warm-up, then cosine: "
        "starting points, not planned."
    ]
    if interval > 1 and laid.engine in HUGGING_FACE:
        lines.append(
            f"* One activation is kept every {interval} layers. transformers checkpoints single layers only, so the "
            "script groups them itself; models whose layers differ (sliding windows) need CHECKPOINT_INTERVAL=1."
        )
    if train.packing:
        lines.append("* Packing: samples run on end to end, split by the end token, with no mask between them.")
    if laid.deployment.precision == "fp16":
        lines.append("* fp16 with dynamic loss scaling: the first steps may be skipped while the scale settles.")
    if train.offload != "none" and laid.engine == "deepspeed":
        lines.append("* Offload uses DeepSpeedCPUAdam, which compiles once at the first start (about two minutes).")
    if train.optimizer == "muon":
        lines.append("* Muon's Adam half is DeepSpeed's FusedAdam, which compiles once at the first start.")
    if train.method == "qlora" and laid.engine == "fsdp2" and train.zero_stage:
        host_gb = laid.plan.model.params_total * 0.6e-9
        lines.append(
            f"* While loading, each process holds the 4-bit model in host memory, about {host_gb:.0f} GB, and hands "
            "its shards to the GPU layer by layer."
        )
    if laid.engine == "fsdp2" and laid.deployment.context_parallel > 1:
        lines.append("* Not run by us: context parallelism needs the attention kernels of GPUs.")
    if laid.engine not in HUGGING_FACE:
        lines.append(
            f"* Not run by us: {laid.title} needs GPUs. The configuration classes of {facts()['read_from'][laid.engine]} "
            "accept files like these."
        )
    return lines

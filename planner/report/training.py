"""How a training plan reads on the console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.plan import Cost, Deployment, MemoryUse, Range, on_host, stage_words
from planner.units import format_duration

if TYPE_CHECKING:
    from planner.solver.compare import Choice


def configuration(d: Deployment) -> str:
    """How it runs, in one line."""
    t = d.train
    if t is None:
        return d.engine
    axes = [
        f"{name} {n}"
        for name, n in (
            ("TP", d.tensor_parallel),
            ("PP", d.pipeline_parallel),
            ("CP", d.context_parallel),
            ("EP", d.expert_parallel),
            ("DP", d.data_parallel),
        )
        if n > 1 or name == "DP"
    ]
    if uneven := stage_words(t.layers_per_stage):
        axes = [f"{axis} ({uneven})" if axis.startswith("PP ") else axis for axis in axes]
    saved = {0: "no activation checkpoints", 1: "every layer checkpointed"}.get(
        t.checkpoint_interval, f"a checkpoint every {t.checkpoint_interval} layers"
    )
    offload = "" if t.offload == "none" else f", {t.offload} in host memory"
    method = "" if t.method == "full" else f" {t.method} rank {t.lora_rank}"
    return (
        f"{d.engine} {d.engine_version}{method}, {d.precision}, {t.optimizer}, {', '.join(axes)}, ZeRO-{t.zero_stage}{offload}, {saved}, "
        f"micro-batch {t.micro_batch_size} x {t.gradient_accumulation_steps} accumulated = {t.global_batch_size} sequences a step, {t.steps:,} steps"
    )


def _span(r: Range, unit: str, digits: int = 2) -> str:
    return f"{r.value:,.{digits}f} {unit}  ({r.low:,.{digits}f} .. {r.high:,.{digits}f})"


def predictions(p: dict[str, Range]) -> list[str]:
    """The predictions, one line each."""
    run = p["total_time_h"]
    low, mid, high = (format_duration(x * 3600) for x in (run.low, run.value, run.high))
    return [
        f"whole run   {mid}  ({low} .. {high})",
        f"step        {_span(p['step_time_s'], 's')}",
        f"tokens/s    {_span(p['throughput_tokens_per_s'], 'in all', 0)}, {p['tokens_per_s_per_gpu'].value:,.0f} per GPU",
        f"MFU         {_span(p['mfu'], '', 3)}",
    ]


def memory_lines(m: MemoryUse, d: Deployment) -> list[str]:
    """Memory of the fullest GPU at its worst moment, part by part, and in a line of its own of the host."""
    host = [] if m.host_ram_gib is None else [f"host memory {m.host_ram_gib:,.0f} GiB per machine: {on_host(d.train)}"]
    return [
        f"weights {m.weights_gib:.2f} + gradients {m.gradients_gib:.2f} + optimizer {m.optimizer_gib:.2f} + activations {m.activations_gib:.2f}"
        f" + the rest {m.runtime_gib:.2f} = {m.total_gib:.2f} of {m.gpu_usable_gib:.2f} GiB at the worst moment",
        *host,
    ]


def money(d: Deployment, c: Cost) -> str:
    """What the run costs."""
    if all(o.tier == "owned" for o in d.offers):
        return "own machines (0 USD counted)"
    return f"${c.usd_total or 0:,.2f} for the run, ${c.usd_per_hour:,.2f}/h"


COLUMNS = [
    "$ run",
    "$/h",
    "framework",
    "TP",
    "PP",
    "CP",
    "DP",
    "ZeRO",
    "mbs",
    "ckpt",
    "offload",
    "run",
    "tok/s/GPU",
    "MFU",
]


def cells(c: Choice) -> list[str]:
    """The cells of one row of a comparison, in the order of COLUMNS."""
    d, p, t = c.deployment, c.predicted, c.deployment.train
    if t is None:
        return [""] * len(COLUMNS)
    return [
        f"{c.cost.usd_total or 0:.2f}",
        f"{c.cost.usd_per_hour:.2f}",
        d.engine,
        str(d.tensor_parallel),
        str(d.pipeline_parallel),
        str(d.context_parallel),
        str(d.data_parallel),
        str(t.zero_stage),
        str(t.micro_batch_size),
        str(t.checkpoint_interval),
        t.offload,
        format_duration(p["total_time_h"].value * 3600),
        f"{p['tokens_per_s_per_gpu'].value:.0f}",
        f"{p['mfu'].value:.2f}",
    ]

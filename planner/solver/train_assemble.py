"""From a row of the training study to the records of a plan: deployment, memory, predictions with ranges, cost."""

from __future__ import annotations

import numpy as np

from planner.estimator.cost.training import run_cost_usd, run_steps
from planner.estimator.intervals import INVERSE, training_interval, training_margins
from planner.estimator.memory.training import TrainMemory
from planner.estimator.train_stages import split_layers
from planner.plan import Cost, Deployment, MemoryUse, Range, TrainSettings
from planner.request import OFFLOADS, TrainRequest
from planner.solver.assemble import offer_choice
from planner.solver.train_site import Block
from planner.solver.train_study import MAX_UTILISATION, TrainStudy
from planner.space.train_rows import TrainRows
from planner.units import GIB, format_duration


def at(study: TrainStudy, row: int) -> tuple[Block, int]:
    """Block and position of a problem row."""
    return study.blocks[int(study.block_of[row])], int(study.position[row])


def layout(study: TrainStudy, row: int) -> TrainRows:
    """The layout of a problem row, as columns of length 1."""
    block, i = at(study, row)
    return block.rows.take(np.array([i]))


def deployment(study: TrainStudy, row: int) -> Deployment:
    """What to start, on what."""
    block, _ = at(study, row)
    r = layout(study, row)
    job = study.request.job
    framework = study.frameworks[int(r.framework[0])]
    micro, data, accumulation = (
        int(c[0]) for c in (r.micro_batch_size, r.data_parallel, r.gradient_accumulation_steps)
    )
    stages = int(r.pipeline_parallel[0])
    batch = micro * data * accumulation
    return Deployment(
        engine=framework.name,
        engine_version=framework.version,
        precision=job.precision,
        kv_cache_dtype="none",
        tensor_parallel=int(r.tensor_parallel[0]),
        pipeline_parallel=stages,
        data_parallel=data,
        expert_parallel=int(r.expert_parallel[0]),
        context_parallel=int(r.context_parallel[0]),
        gpus=int(r.world[0]),
        offers=(offer_choice(study.offers[int(study.problem.rows.hardware[row])], block.machines),),
        train=TrainSettings(
            method=job.method,
            zero_stage=int(r.zero_stage[0]),
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            checkpoint_interval=int(r.checkpoint_interval[0]),
            offload=OFFLOADS[int(r.offload[0])],
            optimizer=job.optimizer,
            seq_len=job.seq_len,
            global_batch_size=batch,
            steps=int(run_steps(job, batch)),
            packing=job.packing,
            lora_rank=None if job.method == "full" else job.lora_rank,
            lora_targets=() if job.method == "full" else job.lora_targets,
            frozen_precision=job.frozen_precision or ("bnb-nf4" if job.method == "qlora" else None),
            chunked_loss=job.chunked_loss,
            layers_per_stage=layers_per_stage(study, row) if stages > 1 else None,
        ),
    )


def layers_per_stage(study: TrainStudy, row: int) -> tuple[int, ...]:
    """How the layers are cut into pipeline stages: as decided, or the only way there is."""
    r, seq_len = layout(study, row), study.request.job.seq_len
    number = int(r.split[0])
    if number:
        return r.splits[number - 1]
    framework = study.frameworks[int(r.framework[0])]
    return split_layers(study.model, seq_len, int(r.pipeline_parallel[0]), framework.uneven_stages)


PARTS = ("peak_weights", "peak_gradients", "peak_optimizer", "activations", "logits", "buffers", "runtime")


def parts_at_peak(memory: TrainMemory, i: int, peak_bytes: float) -> dict[str, float]:
    """Bytes of PARTS of a row, whose sum is peak_bytes. A peak corrected by measurement differs from their own sum: runtime carries what
    is above it or below; where that is more than runtime and buffers, all parts shrink alike."""
    found = {name: float(getattr(memory, f"{name}_bytes")[i]) for name in PARTS}
    fixed = sum(found[name] for name in PARTS[:-2])
    share = min(1.0, peak_bytes / fixed) if fixed else 1.0
    rest = max(peak_bytes - share * fixed, 0.0)
    buffers = min(found["buffers"], rest)
    return {**{name: share * found[name] for name in PARTS}, "buffers": buffers, "runtime": rest - buffers}


def memory_use(study: TrainStudy, row: int) -> MemoryUse:
    """Memory of the fullest GPU at its worst moment; host RAM per machine."""
    block, i = at(study, row)
    m, peak = block.memory, float(block.memory.peak_bytes[i]) / margins_of(study, row)[1]
    part = parts_at_peak(m, i, peak)

    def gib(value: float) -> float:
        return round(float(value) / GIB, 3)

    return MemoryUse(
        gpu_usable_gib=gib(m.usable_bytes[i]),
        weights_gib=gib(part["peak_weights"]),
        kv_cache_gib=0.0,
        activations_gib=gib(part["activations"] + part["logits"]),
        runtime_gib=gib(part["buffers"] + part["runtime"]),
        total_gib=gib(peak),
        headroom_gib=gib(m.usable_bytes[i] - peak),
        kv_cache_tokens=0,
        host_ram_gib=gib(m.host_ram_bytes[i]),
        gradients_gib=gib(part["peak_gradients"]),
        optimizer_gib=gib(part["peak_optimizer"]),
    )


def margins_of(study: TrainStudy, row: int) -> tuple[float, float]:
    """Factors of time and peak memory that a row's limits were held against (1 unless the risk is low)."""
    block, i = at(study, row)
    stack = study.frameworks[int(block.rows.framework[i])]
    return training_margins(study.request.risk, study.classes[block.hardware].gpu, study.model.is_moe, stack.name)


def predicted(study: TrainStudy, row: int) -> dict[str, Range]:
    """Predictions of the run, each with its 80% interval, cut where it would need more than MAX_UTILISATION of the peak."""
    block, i = at(study, row)
    hw, stack = study.classes[block.hardware], study.frameworks[int(block.rows.framework[i])]
    late, _ = margins_of(study, row)
    values = {
        "step_time_s": float(block.time.step_time_s[i]) / late,
        "throughput_tokens_per_s": float(block.time.tokens_per_s[i]),
        "tokens_per_s_per_gpu": float(block.time.tokens_per_s_per_gpu[i]),
        "mfu": float(block.time.mfu[i]),
        "total_time_h": float(block.run_s[i]) / late / 3600,
    }
    ranges = {}
    headroom = max(1.0, MAX_UTILISATION / values["mfu"]) if values["mfu"] > 0 else float("inf")
    for name, value in values.items():
        low, high = training_interval(name, hw.gpu, study.model.is_moe, stack.name)
        low, high = (low, min(high, headroom)) if name in INVERSE else (max(low, 1 / headroom), high)
        ranges[name] = Range(*(round(value * factor, 9) for factor in (1.0, low, high)))
    return ranges


LONG_H = 60 * 24.0


def close_calls(
    request: TrainRequest, plan_parts: tuple[dict[str, Range], Cost, MemoryUse], memory_high: float
) -> tuple[str, ...]:
    """Limits that lie inside the 80% interval of what is predicted, and a run so long that a deadline was probably forgotten."""
    (ranges, money, memory), limits = plan_parts, request.limits
    if request.risk == "low":
        return ()
    whole, step, lines = ranges["total_time_h"], ranges["step_time_s"], []
    usd, worst = money.usd_total or 0.0, whole.high / whole.value if whole.value else 1.0
    for label, value, high, limit, show in (
        ("deadline", whole.value * 3600, whole.high * 3600, limits.deadline_s, format_duration),
        ("step time", step.value, step.high, limits.step_s, format_duration),
        ("budget", usd, usd * worst, limits.budget_usd, lambda v: f"${v:,.2f}"),
    ):
        if limit is not None and high > limit:
            lines.append(
                f"The {label} of {show(limit)} lies inside the 80% interval ({show(value)} is predicted, up to {show(high)}): plan with --risk low where a miss is expensive."
            )
    if memory.total_gib * memory_high > memory.gpu_usable_gib:
        lines.append(
            f"GPU memory: {memory.total_gib:.1f} of {memory.gpu_usable_gib:.1f} GiB is within what the estimate may be off ({(memory_high - 1) * 100:.0f}%, 80% interval):"
            " watch the first steps, or plan with --risk low."
        )
    if limits.deadline_s is None and whole.value > LONG_H:
        lines.append(f"The run takes {whole.value / 24:,.0f} days: give --deadline for a faster one.")
    return tuple(lines)


def close_calls_of(study: TrainStudy, row: int) -> tuple[str, ...]:
    """close_calls of a row."""
    block, i = at(study, row)
    stack = study.frameworks[int(block.rows.framework[i])]
    _, high = training_margins("low", study.classes[block.hardware].gpu, study.model.is_moe, stack.name)
    return close_calls(study.request, (predicted(study, row), cost(study, row), memory_use(study, row)), high)


def cost(study: TrainStudy, row: int) -> Cost:
    """USD per hour of all machines, and of the whole run."""
    block, i = at(study, row)
    offer = study.offers[int(study.problem.rows.hardware[row])]
    hourly = offer.price.usd_per_hour * block.machines
    return Cost(
        round(hourly, 6), None, round(float(run_cost_usd(block.run_s[i] / margins_of(study, row)[0], hourly)), 4)
    )

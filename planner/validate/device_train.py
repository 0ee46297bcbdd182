"""Training on the device at hand: a micro-batch forward and backward, and the optimizer on one rank's share of the states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.engines.training import framework
from planner.estimator.time.training import training_time
from planner.models.spec import ModelSpec
from planner.plan import Deployment, Plan, TrainSettings
from planner.request import OFFLOADS, TrainJob
from planner.space.hardware_classes import HardwareClass
from planner.space.train_rows import TrainRows
from planner.units import GIB
from planner.validate.device import Place, Progress, Times, at_all_layers, peak_bytes, profiled, timed_s
from planner.validate.dry import Part
from planner.validate.dry_model import DTYPES, build, build_config, recompute


def predicted_training_s(spec: ModelSpec, dep: Deployment, train: TrainSettings, place: Place) -> tuple[float, float]:
    """(forward and backward of one micro-batch with recomputation, optimizer step) by the plan's estimator, without traffic and Trainer."""
    offer = dep.offers[0]
    link = place.catalog.links[place.gpu.default_link]
    hw = HardwareClass(place.gpu, offer.gpus_per_instance, link, None, ())
    job = TrainJob(
        method=train.method,
        seq_len=train.seq_len,
        packing=train.packing,
        optimizer=train.optimizer,
        precision=dep.precision,
    )
    row = (0, dep.tensor_parallel, 1, 1, dep.data_parallel, 1, train.zero_stage, train.micro_batch_size, train.gradient_accumulation_steps,
           train.checkpoint_interval, OFFLOADS.index(train.offload))  # fmt: skip
    stack = framework(dep.engine)
    time = training_time(spec, job, hw, [stack], TrainRows.of([row]))
    work = float(time.compute_s[0] + time.recompute_s[0]) / train.gradient_accumulation_steps
    return work, max(0.0, float(time.optimizer_s[0]) - stack.on(place.gpu).number("step_overhead_s"))


def _times(
    place: Place, raw: dict[str, Any], dep: Deployment, train: TrainSettings, layers: int, trace: Path | None
) -> Times:
    """A micro-batch and an optimizer step of so many layers.

    DeepSpeed trains 16-bit weights beside fp32 masters, the others fp32 weights under autocast. The optimizer steps the rank's share.
    """
    torch, device = place.device.torch, place.device
    half = getattr(torch, DTYPES[dep.precision])
    pure = dep.engine == "deepspeed"
    peaks: list[float] = []
    with peak_bytes(device, peaks):
        model = (
            build(build_config(raw, layers, dep.tensor_parallel), half if pure else torch.float32)
            .to(device.name)
            .train()
        )
        if train.checkpoint_interval:
            recompute(model, train.checkpoint_interval)
        ids = torch.randint(0, model.config.vocab_size, (train.micro_batch_size, train.seq_len), device=device.name)
        shards = dep.data_parallel if train.zero_stage >= 1 else 1
        count = sum(p.numel() for p in model.parameters()) // shards
        if shards == 1 and not pure:
            owned = list(model.parameters())
        else:
            owned = [torch.nn.Parameter(torch.zeros(count, device=device.name))]
            owned[0].grad = torch.zeros_like(owned[0])
        optimizer = torch.optim.AdamW(owned, fused=True)

        def micro_batch() -> None:
            with torch.autocast(device.name.split(":")[0], half, enabled=not pure):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()

        work = timed_s(device, micro_batch)
        step = timed_s(device, optimizer.step)
        profiled(device, trace, micro_batch)
    return Times(work, step, peaks[0] if peaks else None)


def training(
    plan: Plan, raw: dict[str, Any], spec: ModelSpec, place: Place, trace: Path | None, progress: Progress
) -> tuple[list[Part], dict[str, float], list[str]]:
    """Parts, what the contract names of them, and notes."""
    dep = plan.deployment
    if dep is None or dep.train is None:
        raise ValueError("a plan without training settings")
    train = dep.train

    def run(layers: int, last: bool) -> Times:
        return _times(place, raw, dep, train, layers, trace if last else None)

    found = at_all_layers("training", run, len(spec.layers), progress)
    work, step = found.first_s, found.second_s
    expected = predicted_training_s(spec, dep, train, place)
    parts = [
        Part("micro-batch", "ms", expected[0] * 1e3, work * 1e3),
        Part("optimizer step", "ms", expected[1] * 1e3, step * 1e3),
    ]
    runs = train.gradient_accumulation_steps
    ratio = (runs * work + step) / (runs * expected[0] + expected[1])
    predicted = plan.predicted["step_time_s"].value
    others = max(predicted - runs * expected[0] - expected[1], 0.0)
    contract = {"step_time_s": round(runs * work + step + others, 6)}
    notes = [f"A step is {runs} micro-batch(es) and the optimizer: {ratio:.2f} times what is predicted for them."]
    if others > 0:
        notes.append(f"step_time_s holds {others:.3g} s of traffic and Trainer as predicted: neither is run here.")
    if dep.gpus == 1 and found.peak and plan.memory is not None:
        peak = found.peak / GIB
        fixed = framework(dep.engine).on(place.gpu).number("context_gib") if place.device.cuda else 0.0
        parts.append(Part("peak memory", "GiB", plan.memory.total_gib, peak + fixed))
        contract["peak_memory_gib"] = round(peak + fixed, 4)
    return parts, contract, notes

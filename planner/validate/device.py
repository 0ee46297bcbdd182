"""`planner validate --level device`: one rank's shard of a plan timed on the device at hand, beside what the plan predicts.

Real transformers modules with random weights and real kernels. Two sizes of a few layers are timed; time and memory of all layers
lie on the line through them. There is one process, so collectives, pipeline and server are not in it: they are left out of the prediction too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import InputError, InvalidValueError, NoPlanError, UnknownNameError
from planner.hardware.catalog import find_gpu
from planner.hardware.records import Catalog, Gpu
from planner.plan import Deployment, Plan
from planner.validate.calibrate.clock import Device
from planner.validate.calibrate.machine import cpu_name, why_no_gpu
from planner.validate.dry import Part
from planner.validate.dry_model import raw_config, spec_of, torch_modules
from planner.validate.planned import planned_gpu

FEW, MORE = 1, 3
REPEATS = 3
TRAINED = ("fsdp2", "ddp", "deepspeed")
NSYS = "nsys profile --profile=cuda,nvtx,osrt --output device-%p planner validate {plan} --level device"
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class DeviceRun:
    """parts: predicted beside measured. contract: what goes into validation.measured, {} where the device is not the planned one."""

    parts: tuple[Part, ...]
    contract: dict[str, float]
    notes: tuple[str, ...]
    peak_parts_gib: dict[str, float] = field(default_factory=dict)

    def validation(self) -> dict[str, Any]:
        """The tree that goes into Plan.validation: the contract's names, and every part by its own."""
        measured = {**self.contract, **{f"{p.name} ({p.unit})": round(p.counted, 4) for p in self.parts}}
        errors = {p.name: round(p.error_percent, 2) for p in self.parts if p.error_percent is not None}
        return {"level": "device", "measured": measured, "error_percent": errors}


@dataclass(frozen=True)
class Place:
    """The device at hand and the plan's GPU; same: they are the same kind, so that the comparison says something."""

    device: Device
    gpu: Gpu
    same: bool
    name: str
    catalog: Catalog


def device_run(plan: Plan, trace: Path | None, progress: Progress) -> DeviceRun:
    """Time one rank's shard of the plan here. trace: file for a torch profiler trace of one run.

    Raises NoPlanError, MissingExtraError, InvalidValueError for what has no stand-in on one device, ModelConfigError without a config,
    InputError when memory runs out.
    """
    dep = plan.deployment
    if dep is None or plan.memory is None:
        raise NoPlanError("the plan is infeasible", "there is nothing to time", "Relax what its explanation names.")
    _refuse(dep)
    raw, spec = raw_config(plan), spec_of(plan)
    place = find_place(plan, dep)
    gc.enable()
    try:
        if dep.train is not None:
            from planner.validate.device_train import training

            parts, contract, notes = training(plan, raw, spec, place, trace, progress)
        else:
            from planner.validate.device_serve import serving

            parts, contract, notes = serving(plan, raw, spec, place, trace, progress)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        raise InputError(
            "the shard does not fit this device",
            (str(error).splitlines() or ["no memory"])[0][:120],
            "Plan a smaller batch, or a larger device.",
        ) from None
    told = (
        *notes,
        f"{MORE} layers at most were run on {place.name}; all {len(spec.layers)} lie on the line through {FEW} and {MORE}.",
    )
    if not place.same:
        told = (
            *told,
            f"The plan is for {place.gpu.name}, this is {place.name}: the differences say nothing about the plan, and nothing is written for --calibration.",
        )
    told = (*told, f"For Nsight Systems: {NSYS.format(plan='PLAN')}")
    return DeviceRun(tuple(parts), contract if place.same else {}, told)


def _refuse(dep: Deployment) -> None:
    train, why = dep.train, ""
    if dep.pipeline_parallel * dep.context_parallel * dep.expert_parallel > 1:
        why = "pipeline, context and expert parallelism need several devices"
    elif train is not None and dep.engine not in TRAINED:
        why = f"{dep.engine} has its own model; timed are {', '.join(TRAINED)}"
    elif train is not None and (train.method != "full" or train.optimizer != "adamw" or train.offload != "none"):
        why = "timed is full training with adamw, without offload"
    elif train is not None and (train.chunked_loss or train.checkpoint_interval > 1):
        why = "chunked loss and checkpoints over several layers are not timed"
    elif dep.precision not in ("bf16", "fp16"):
        why = f"weights in {dep.precision} have kernels of the engine's own"
    if why:
        raise InvalidValueError(
            "the device run cannot time this plan",
            why,
            "Validate with --level dry, or on the machine with --level engine.",
        )


def find_place(plan: Plan, dep: Deployment) -> Place:
    """The first accelerator that torch sees, or the CPU where the plan is for one or there is nothing else."""
    torch, _ = torch_modules()
    offer, (gpu, catalog) = dep.offers[0], planned_gpu(plan, dep)
    if offer.cpu_threads is not None:
        torch.set_num_threads(offer.cpu_threads)
        return Place(Device(torch, "cpu", offer.cpu_threads), gpu, cpu_name() in gpu.source, cpu_name(), catalog)
    if not torch.cuda.is_available():
        raise InvalidValueError(
            f"torch sees no GPU, and the plan is for {gpu.name}",
            why_no_gpu(torch),
            "Run it on such a machine, or validate with --level dry.",
        )
    name = torch.cuda.get_device_properties(0).name
    try:
        same = find_gpu(name, catalog).name == gpu.name
    except UnknownNameError:
        same = False
    return Place(Device(torch, "cuda:0"), gpu, same or name in gpu.source, name, catalog)


@dataclass(frozen=True)
class Times:
    """Seconds of two pieces of work, and the peak bytes of the run (None where the system does not tell)."""

    first_s: float
    second_s: float
    peak: float | None


def timed_s(device: Device, work: Callable[[], Any]) -> float:
    """Seconds of the fastest of REPEATS runs, launches included, after a run that warms up. The clock is that of calibrate."""
    best, now = float("inf"), device.now
    for turn in range(REPEATS + 1):
        start = now()
        work()
        device.wait()
        if turn:
            best = min(best, now() - start)
    return best


def line(few: float, more: float, layers: int) -> float:
    """The value at `layers` layers on the line through FEW and MORE."""
    return few + (more - few) * (layers - FEW) / (MORE - FEW)


def at_all_layers(name: str, run: Callable[[int, bool], Times], layers: int, progress: Progress) -> Times:
    """Times and peak at `layers` layers, from runs of FEW and of MORE. run: of so many layers, and whether it is the one to trace."""
    few = run(FEW, False)
    progress(name, 0.4)
    more = run(MORE, True)
    progress(name, 1.0)
    peak = line(few.peak, more.peak, layers) if few.peak and more.peak else None
    return Times(line(few.first_s, more.first_s, layers), line(few.second_s, more.second_s, layers), peak)


@contextmanager
def peak_bytes(device: Device, found: list[float]) -> Iterator[None]:
    """Appends the peak of what runs inside: of torch's allocator on an accelerator, of the resident set on a CPU."""
    gc.collect()
    if device.cuda:
        device.torch.cuda.reset_peak_memory_stats()
        yield
        found.append(float(device.torch.cuda.max_memory_allocated()))
        return
    status = Path("/proc/self/status")
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # since Linux 4.0: resets the peak
    except OSError:
        status = Path("/nowhere")
    yield
    if status.exists():
        row = next(r for r in status.read_text("utf-8").splitlines() if r.startswith("VmHWM"))
        found.append(float(row.split()[1]) * 1024)


def profiled(device: Device, trace: Path | None, work: Callable[[], Any]) -> None:
    """One run under torch's profiler, written as a Chrome trace; whole or not at all."""
    if trace is None:
        return
    with device.torch.profiler.profile() as profile:
        work()
        device.wait()
    part = trace.with_name(trace.name + ".part")
    try:
        profile.export_chrome_trace(str(part))
        part.replace(trace)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        raise InvalidValueError(f"cannot write {str(trace)!r}", str(error)[:100], "Give another --profile.") from None

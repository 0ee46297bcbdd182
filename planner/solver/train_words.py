"""The sentences of a training plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.clock import today
from planner.estimator.time.surfaces import surface_of
from planner.hardware.owned import owned_notes
from planner.hardware.records import Catalog
from planner.plan import OfferChoice, Relaxation, stage_words
from planner.request import OFFLOADS
from planner.solver.explain import Binding
from planner.solver.problem import TIE_PERCENT, LimitName
from planner.solver.ranking import Ranking
from planner.solver.search import Answer
from planner.solver.train_assemble import at, layers_per_stage, layout
from planner.solver.train_pins import pin_problems
from planner.solver.train_study import DEARER, MAX_UTILISATION, TrainStudy
from planner.solver.words import stale_price
from planner.space.train_candidates import batch_range
from planner.space.train_layout import job_problem
from planner.units import GIB, format_duration

FLAGS: dict[LimitName, str] = {
    "vram": "GPU memory",
    "host_ram": "host memory",
    "step_time": "--step-time",
    "deadline": "--deadline",
    "budget": "--budget (whole run)",
    "budget_per_hour": "--budget (per hour)",
    "max_gpus": "--max-gpus",
    "quota": "machines available",
}


def assumptions(study: TrainStudy, row: int | None, catalog: Catalog) -> tuple[str, ...]:
    """What the answer rests on, first lines first."""
    request, job = study.request, study.request.job
    fewest, most = batch_range(job)
    what = {
        "full": "all weights",
        "lora": f"LoRA adapters of rank {job.lora_rank}",
        "qlora": f"QLoRA adapters of rank {job.lora_rank} on nf4 weights",
    }[job.method]
    lines = [
        f"Trains {what} on {job.tokens:.4g} tokens in sequences of {job.seq_len} tokens{', packed' if job.packing else ''}, {job.optimizer}, {job.precision}."
    ]
    if request.risk == "low":
        lines.append(
            "--risk low: deadline, step time, budget and GPU memory are held against the bad end of the 80% range of each prediction, so that"
            " about nine in ten hold; costs are compared there too."
        )
    if job.batch_tokens_high is None:
        lines.append(f"Global batch between {fewest} and {most} sequences (not stated: --global-batch fixes it).")
    if job.method != "full":
        lines.append("MFU counts 6 FLOPs per weight and token, as for full training, although frozen weights need 4.")
    lines.append(
        "The run is the training steps alone: no evaluation, checkpoint writing, restarts or data preparation."
    )
    if request.hardware.owned is None:
        lines.append(
            f"Prices: {', '.join(request.hardware.tiers)}; whole machines are rented, for the duration of the run."
        )
    else:
        lines.extend(owned_notes(request.hardware.owned, request.hardware.fabric_gbps, catalog))
    lines.append(
        f"No kernel is taken to reach more than {MAX_UTILISATION:.0%} of the dense peak: hardware that loses even so was not estimated."
    )
    if request.goal == "fastest":
        lines.append(f"Runs within {TIE_PERCENT:g}% are ties, broken by cost.")
    if row is not None:
        offer = study.offers[int(study.problem.rows.hardware[row])]
        if offer.instance.ram_gib is None:
            taken = (
                f"taken as {offer.host_ram_gib:.0f} GiB, what its GPUs have"
                if offer.host_ram_gib
                else "not limited here"
            )
            lines.append(
                f"Nobody states the host memory of this machine: {taken}. Check it, offloading and loading need it."
            )
    lines.extend(study.model.assumptions)
    return tuple(lines)


LARGE_HOST_GIB = 2048.0  # the most that machines of eight GPUs in the catalog have, but for a few


def warnings(study: TrainStudy, row: int, offers: Sequence[OfferChoice]) -> tuple[str, ...]:
    """What a person should know before spending money."""
    block, i = at(study, row)
    hw = study.classes[block.hardware]
    framework = study.frameworks[int(block.rows.framework[i])]
    lines = [line for offer in offers if (line := stale_price(offer, today()))]
    needs = float(block.memory.host_ram_bytes[i]) / GIB
    if study.offers[int(study.problem.rows.hardware[row])].host_ram_gib is None and needs > LARGE_HOST_GIB:
        lines.append(
            f"The run needs {needs:,.0f} GiB of host memory in each machine, more than most have, and nobody states what this one has."
        )
    surface = surface_of(hw.gpu)
    if surface.borrowed:
        lines.append(
            f"The kernels of {hw.gpu.name} were not measured: its times are those of {surface.surface}, scaled by peak and bandwidth."
        )
    if hw.gpu.unverified:
        lines.append(f"Not verified for {hw.gpu.name}: {', '.join(hw.gpu.unverified)}.")
    for link in {hw.link, hw.fabric} if block.machines > 1 else {hw.link}:
        if link is not None and not link.verified and hw.gpus_per_node * block.machines > 1:
            lines.append(f"The figures of the link {link.name} are not verified.")
    if not framework.verified:
        lines.append(
            f"{framework.label} {framework.version} was never run here: its configuration classes accept the launch files, no more is known."
        )
    if study.model.gated_repo:
        lines.append(
            f"{study.model.hf_id} is a gated repository: accept its licence and set HF_TOKEN before you start."
        )
    return tuple(lines)


def describe(study: TrainStudy, row: int) -> str:
    """A configuration in one phrase."""
    block, _ = at(study, row)
    r = layout(study, row)
    hw, framework = study.classes[block.hardware], study.frameworks[int(r.framework[0])]
    axes = [
        f"{name}{int(value[0])}"
        for name, value in (
            ("TP", r.tensor_parallel),
            ("PP", r.pipeline_parallel),
            ("CP", r.context_parallel),
            ("DP", r.data_parallel),
        )
        if int(value[0]) > 1
    ]
    uneven = f" ({words})" if (words := stage_words(layers_per_stage(study, row))) else ""
    offload = f", {OFFLOADS[int(r.offload[0])]} in host memory" if int(r.offload[0]) else ""
    return f"{block.machines}x ({hw.label}), {framework.label} {' '.join(axes) or 'one GPU'}{uneven} ZeRO-{int(r.zero_stage[0])}{offload}"


def _amount(study: TrainStudy, ranking: Ranking, name: LimitName, row: int) -> str:
    block, i = at(study, row)
    limit = study.problem.limits.get(name, 0)
    if name == "vram":
        return (
            f"{block.memory.peak_bytes[i] / GIB:.1f} GiB against {block.memory.usable_bytes[i] / GIB:.1f} GiB per GPU"
        )
    if name == "host_ram":
        ram = study.offers[int(study.problem.rows.hardware[row])].host_ram_gib
        return f"{block.memory.host_ram_bytes[i] / GIB:.0f} GiB against {ram or 0:.0f} GiB per machine"
    if name == "step_time":
        return (
            f"a step takes {format_duration(float(block.time.step_time_s[i]))} against {format_duration(limit / 1e6)}"
        )
    if name == "deadline":
        return f"the run takes {format_duration(float(block.run_s[i]))} against {format_duration(limit / 1e6)}"
    if name == "budget":
        return f"${ranking.cost[row] / 1e6:,.2f} against ${limit / 1e6:,.2f}"
    if name == "budget_per_hour":
        return f"${(ranking.broken[name][row] + limit) / 1e6:,.2f}/h against ${limit / 1e6:,.2f}/h"
    if name == "quota":
        return f"{ranking.broken[name][row]} machines more than there are"
    return f"{limit + int(ranking.broken[name][row])} GPUs against {limit}"


def _gain(study: TrainStudy, ranking: Ranking, row: int, winner: int) -> str:
    if study.problem.goal == "cheapest":
        return f"${ranking.cost[row] / 1e6:,.2f} for the run instead of ${ranking.cost[winner] / 1e6:,.2f}"
    rows = study.problem.rows
    return f"{format_duration(rows.duration_us[row] / 1e6)} for the run instead of {format_duration(rows.duration_us[winner] / 1e6)}"


def binding(study: TrainStudy, ranking: Ranking, found: Sequence[Binding], winner: int) -> tuple[str, ...]:
    """One line per limit that holds the answer where it is: what would win without it."""
    lines = [
        f"{FLAGS[b.limit]}: without it {describe(study, b.row)} would win with {_gain(study, ranking, b.row, winner)} ({_amount(study, ranking, b.limit, b.row)})"
        for b in found
    ]
    return tuple(lines) or ("no limit: nothing that was searched does better even without the limits",)


def broken(study: TrainStudy, ranking: Ranking, row: int) -> str:
    """The first limit a row breaks, and by how much; empty when it breaks none."""
    for name, over in ranking.broken.items():
        if over[row] > 0:
            return f"breaks {FLAGS[name]}: {_amount(study, ranking, name, row)}"
    return ""


def why_not(study: TrainStudy, ranking: Ranking, row: int, winner: int) -> str:
    """Why a row lost against the winner."""
    breaks = broken(study, ranking, row)
    if breaks:
        return f"{breaks}; else {_gain(study, ranking, row, winner)}"
    rows = study.problem.rows
    cost, best = int(ranking.cost[row]), int(ranking.cost[winner])
    if cost > best:
        more = f" (+{(cost / best - 1) * 100:.0f}%)" if best else ""
        return f"costs ${cost / 1e6:,.2f} instead of ${best / 1e6:,.2f}{more}, takes {format_duration(rows.duration_us[row] / 1e6)}"
    time, least = (format_duration(rows.duration_us[i] / 1e6) for i in (row, winner))
    return "costs and takes the same" if time == least else f"takes {time} instead of {least}"


def core(study: TrainStudy, names: Sequence[LimitName]) -> tuple[str, ...]:
    """The clashing limits in words."""
    limits = study.request.limits
    values = {
        "vram": "weights, states and activations must fit the GPU",
        "host_ram": "what is loaded and offloaded must fit the machine's memory",
        "step_time": f"a step in at most {format_duration(limits.step_s or 0)}",
        "deadline": f"the run in at most {format_duration(limits.deadline_s or 0)}",
        "budget": f"at most ${limits.budget_usd or 0:g} for the run",
        "budget_per_hour": f"at most ${limits.budget_usd_per_hour or 0:g}/h",
        "max_gpus": f"at most {limits.max_gpus} GPUs",
        "quota": "no more machines than there are",
    }
    return tuple(f"{FLAGS[n]}: {values[n]}" for n in names)


def nothing_at_all(study: TrainStudy) -> tuple[str, ...]:
    """Why there is no configuration whatever the limits: frameworks that cannot do the job at all, else the pinned options
    to blame, else what was left out."""
    request = study.request
    found: dict[str, None] = {}
    for stack in study.frameworks:
        if request.pins.framework not in (None, stack.name):
            continue
        problems = [job_problem(study.model, request.job, stack, hw.gpu) for hw in study.classes]
        if problems and all(problems):
            found[str(problems[0])] = None
    blamed = pin_problems(study) if not found else ()
    if blamed:
        return blamed
    reasons = sorted(((r, n) for r, n in study.pruned.items() if n and r != DEARER), key=lambda kv: -kv[1])
    lines = (*found, *(f"{reason} ({count}x)" for reason, count in reasons[:5]))
    return lines or ("no machine matches the request",)


def relaxation(study: TrainStudy, name: LimitName, row: int, answer: Answer) -> Relaxation:
    """The smallest value of one limit that makes the request feasible, rounded so that it really does."""
    block, i = at(study, row)
    limits, offers = study.request.limits, study.problem.offers
    hours = float(block.run_s[i]) / 3600
    if name == "vram":
        usable, need = float(block.memory.usable_bytes[i]) / GIB, float(block.memory.peak_bytes[i]) / GIB
        return Relaxation(FLAGS[name], round(usable, 1), round(need + 0.05, 1), "GiB per GPU")
    if name == "host_ram":
        ram = study.offers[int(study.problem.rows.hardware[row])].host_ram_gib
        return Relaxation(
            FLAGS[name],
            round(ram or 0.0, 1),
            round(float(block.memory.host_ram_bytes[i]) / GIB + 0.05, 1),
            "GiB per machine",
        )
    if name == "step_time":
        return Relaxation(FLAGS[name], limits.step_s or 0, float(np.ceil(block.time.step_time_s[i] * 1e3) / 1e3), "s")
    if name == "deadline":
        return Relaxation(FLAGS[name], (limits.deadline_s or 0) / 3600, float(np.ceil(hours * 1e3) / 1e3), "h")
    if name == "budget":
        return Relaxation(
            FLAGS[name],
            limits.budget_usd or 0,
            float(np.ceil(study.problem.rows.cost_of_run(row) / 1e4) / 100),
            "USD",
        )
    if name == "budget_per_hour":
        hourly = sum(offers[o].micro_usd_per_hour * n for o, n in answer.machines.items())
        return Relaxation(FLAGS[name], limits.budget_usd_per_hour or 0, -(-hourly // 10_000) / 100, "USD/h")
    if name == "quota":
        return Relaxation(
            FLAGS[name], sum(offers[o].limit or 0 for o in answer.machines), sum(answer.machines.values()), "machines"
        )
    return Relaxation(
        FLAGS[name], limits.max_gpus or 0, sum(offers[o].gpus * n for o, n in answer.machines.items()), "GPUs"
    )

"""The sentences of a plan: what was assumed, what to beware of, what binds, why an alternative lost, what would help."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from planner.clock import today
from planner.estimator.memory.rules import memory_rules
from planner.estimator.operating_point import MAX_REPLICAS
from planner.estimator.time.surfaces import surface_of
from planner.hardware.owned import owned_notes
from planner.hardware.records import Catalog
from planner.models.precision import precision as precision_of
from planner.models.spec import ModelSpec
from planner.plan import OfferChoice, Relaxation
from planner.request import ServeRequest
from planner.solver.assemble import checkpoint_to_load, parts
from planner.solver.choices import describe_load
from planner.solver.explain import BOUNDS, Binding
from planner.solver.problem import TIE_PERCENT, LimitName
from planner.solver.ranking import Ranking
from planner.solver.search import Answer
from planner.solver.study import MAX_THROUGHPUT_REPLICAS, OVERLOADED, Study
from planner.units import GIB, format_against, format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

STALE_DAYS = 14
WORTH_OFFERING = 0.01

TIMES: dict[LimitName, str] = {"ttft": "TTFT p95", "tpot": "TPOT", "e2e": "E2E"}
FLAGS: dict[LimitName, str] = {
    "vram": "GPU memory",
    "ttft": "--latency (TTFT p95)",
    "tpot": "--tpot",
    "e2e": "--e2e",
    "max_accuracy_loss": "--max-accuracy-loss",
    "budget": "--budget",
    "max_gpus": "--max-gpus",
    "quota": "machines available",
    "min_throughput": "--min-throughput",
}


def assumptions(study: Study, catalog: Catalog) -> tuple[str, ...]:
    """What the answer rests on, first lines first."""
    request, w = study.request, study.request.workload
    lines = []
    if request.goal == "throughput" and w.concurrency is None:
        lines.append(
            f"Load: as much as the limits allow, {w.input_tokens} input and {w.output_tokens} output tokens per request (means)."
        )
    else:
        lines.append(
            f"Load: {describe_load(request)}, {w.input_tokens} input and {w.output_tokens} output tokens per request (means)."
        )
    if request.limits.ttft_s is not None:
        lines.append(
            f"--latency {format_duration(request.limits.ttft_s)} is read as time to first token, 95th percentile, under that load."
        )
    if request.risk == "low":
        lines.append(
            "--risk low: limits are held against the bad end of the 80% range of each prediction, so that about nine in ten hold."
        )
    s = study.pairs.settings
    whole = [e.name for e in study.pairs.engines if s.step_tokens(e) > s.max_num_batched_tokens]
    lines.append(
        f"The engine accepts requests of up to {s.max_model_len} tokens and batches up to {s.max_num_batched_tokens} tokens a step"
        + (f" ({', '.join(whole)}: {s.max_model_len}, a whole prompt)." if whole else ".")
    )
    if request.hardware.owned is None:
        lines.append(f"Prices: {', '.join(request.hardware.tiers)}; whole machines are rented.")
    else:
        lines.extend(owned_notes(request.hardware.owned, request.hardware.fabric_gbps, catalog))
    if request.goal == "fastest":
        lines.append(f"End-to-end times within {TIE_PERCENT:g}% are ties, broken by cost.")
    lines.append("No prefix is shared between requests, and no speculative decoding is used.")
    lines.extend(study.model.assumptions)
    return tuple(lines)


def stale_price(offer: OfferChoice, now: dt.date) -> str:
    """A line about the age of a price that is older than STALE_DAYS; empty when it is fresh or the machine is owned."""
    age = (now - dt.date.fromisoformat(offer.observed_at)).days
    if offer.tier == "owned" or age <= STALE_DAYS:
        return ""
    return f"The price of {offer.provider} {offer.instance_type} is {age} days old ({offer.observed_at}): check it before you rent."


def warnings(study: Study, row: int, offers: Sequence[OfferChoice]) -> tuple[str, ...]:
    """What a person should know before spending money."""
    _, shard, engine, _ = parts(study, row)
    lines: list[str] = []
    lines.extend(line for offer in offers if (line := stale_price(offer, today())))
    support = engine.support(shard.precision.name, shard.gpu)
    repo = checkpoint_to_load(study.model, engine, shard)
    if repo is not None:
        lines.append(f"Loads {repo}, published by others: check that it is the model you mean.")
    elif support is not None and support.needs_checkpoint and shard.precision.name != study.model.native_precision:
        lines.append(
            f"No published {shard.precision.name} checkpoint is known: find or make one ({support.note or 'see the engine'})."
        )
    if shard.gpu.unverified:
        lines.append(f"Not verified for {shard.gpu.name}: {', '.join(shard.gpu.unverified)}.")
    if not shard.precision.verified:
        lines.append(f"The accuracy figure of {shard.precision.name} is not verified.")
    surface = surface_of(shard.gpu)
    if surface.borrowed:
        lines.append(
            f"The kernels of {shard.gpu.name} were not measured: its times are those of {surface.surface}, scaled by peak and bandwidth."
        )
    if not memory_rules(engine.constants, engine.version).verified:
        lines.append(
            f"What {engine.name} {engine.version} keeps for activations and runtime is estimated, not measured."
        )
    if not engine.verified:
        lines.append(f"Support of {engine.name} {engine.version} was read from its documentation, not run.")
    for link in {shard.tensor_link, shard.pipeline_link}:
        if link is not None and not link.verified:
            lines.append(f"The figures of the link {link.name} are not verified.")
    if any(offer.tier == "spot" for offer in offers):
        lines.append("Spot machines may be taken away at any time: keep a fallback.")
    if engine.name == "tensorrt_llm" and study.problem.rows.nodes_per_replica[row] > 1:
        lines.append("TensorRT-LLM over several machines is an MPI job: only serve.slurm launches it.")
    if study.model.gated_repo and repo is None:
        lines.append(
            f"{study.model.hf_id} is a gated repository: accept its licence and set HF_TOKEN before you start."
        )
    return tuple(lines)


MUCH_FASTER = 0.8  # of the winner's time: worth naming as an alternative of its own


def describe(study: Study, row: int, replicas: int, machines: int) -> str:
    """A configuration in one phrase."""
    hw, shard, engine, _ = parts(study, row)
    pp = f" PP{shard.pipeline_parallel}" if shard.pipeline_parallel > 1 else ""
    copies = f", {replicas} replicas" if replicas > 1 else ""
    return f"{machines}x ({hw.label}), {engine.name} {shard.precision.name} TP{shard.tensor_parallel}{pp}{copies}"


def _amount(study: Study, name: LimitName, row: int, ranking: Ranking) -> str:
    """What the row needs of the limit it breaks, against what is allowed."""
    rows, limits = study.problem.rows, study.problem.limits
    limit = limits.get(name, 0)
    if name == "vram":
        at = int(study.placed.row[row])
        return f"{study.rows.required_bytes[at] / GIB:.1f} GiB against {study.rows.capacity_bytes[at] / GIB:.1f} GiB per GPU"
    if name in TIMES:
        worst = " at the bad end of its range" if study.request.risk == "low" else ""
        return f"{TIMES[name]} {format_against(int(rows.metrics[name][row]) / 1e6, limit / 1e6)}{worst}"
    if name == "max_accuracy_loss":
        return f"expected accuracy loss {rows.metrics[name][row] / 1e4:.2f}% against {limit / 1e4:.2f}%"
    if name == "budget":
        return f"${ranking.cost[row] / 1e6:.2f}/h against ${limit / 1e6:.2f}/h"
    if name == "quota":
        return f"{ranking.broken[name][row]} machines more than there are"
    if name == "max_gpus":
        return f"{limit + int(ranking.broken[name][row])} GPUs against {limit}"
    tokens = int(rows.tokens_milli_per_s[row] * ranking.replicas[row])
    return f"{tokens / 1e3:.0f} tokens/s against {limit / 1e3:.0f}"


def _gain(study: Study, ranking: Ranking, row: int, winner: int) -> str:
    goal = study.problem.goal
    if goal == "cheapest":
        return f"${ranking.cost[row] / 1e6:.2f}/h instead of ${ranking.cost[winner] / 1e6:.2f}/h"
    if goal == "fastest":
        rows = study.problem.rows
        return f"E2E {format_duration(rows.duration_us[row] / 1e6)} instead of {format_duration(rows.duration_us[winner] / 1e6)}"
    return f"{-ranking.key[row, 0] / 1e3:.0f} tokens/s instead of {-ranking.key[winner, 0] / 1e3:.0f}"


def binding(
    study: Study, ranking: Ranking, found: Sequence[Binding], winner: int, replicas: int = 0
) -> tuple[str, ...]:
    """One line per limit that holds the answer where it is: what would win without it."""
    lines = []
    if study.problem.goal == "throughput":
        bounds = [FLAGS[n] for n in BOUNDS if n in study.problem.limits]
        bounds += ["machines available"] if any(o.limit is not None for o in study.problem.offers) else []
        lines.append(f"{', '.join(bounds)}: goal throughput takes as many replicas as these allow")
        if replicas >= MAX_THROUGHPUT_REPLICAS:
            lines.append(f"no more than {MAX_THROUGHPUT_REPLICAS} replicas are searched")
    for b in found:
        phrase = describe(study, b.row, int(ranking.replicas[b.row]), int(ranking.machines[b.row]))
        lines.append(
            f"{FLAGS[b.limit]}: without it {phrase} would win with {_gain(study, ranking, b.row, winner)} ({_amount(study, b.limit, b.row, ranking)})"
        )
    return tuple(lines) or ("no limit: nothing in the catalog does better even without the limits",)


def broken(study: Study, ranking: Ranking, row: int) -> str:
    """The first limit a row breaks, and by how much; empty when it breaks none."""
    for name, over in ranking.broken.items():
        if over[row] > 0:
            return f"breaks {FLAGS[name]}: {_amount(study, name, row, ranking)}"
    return ""


def why_not(study: Study, ranking: Ranking, row: int, winner: int) -> str:
    """Why a row lost against the winner."""
    breaks = broken(study, ranking, row)
    if breaks:
        return f"{breaks}; else {_gain(study, ranking, row, winner)}"
    rows = study.problem.rows
    cost, best = int(ranking.cost[row]), int(ranking.cost[winner])
    if study.problem.goal == "throughput" and ranking.key[row, 0] != ranking.key[winner, 0]:
        return _gain(study, ranking, row, winner)
    price, paid = f"${cost / 1e6:.2f}/h", f"${best / 1e6:.2f}/h"
    if study.problem.goal == "fastest" and ranking.key[row, 0] != ranking.key[winner, 0]:
        return f"{_gain(study, ranking, row, winner)}, at {'the same price' if price == paid else f'{price} instead of {paid}'}"
    speed = f"E2E {format_duration(rows.duration_us[row] / 1e6)} instead of {format_duration(rows.duration_us[winner] / 1e6)}"
    if cost > best:
        more = f" (+{(cost / best - 1) * 100:.0f}%)" if best else ""
        faster = f", {speed}" if rows.duration_us[row] < MUCH_FASTER * rows.duration_us[winner] else ""
        return f"costs {price} instead of {paid}{more}{faster}"
    if rows.duration_us[row] > rows.duration_us[winner]:
        return f"same price, slower: {speed}"
    return "equal in price and latency, uses no fewer GPUs"


def core(study: Study, names: Sequence[LimitName]) -> tuple[str, ...]:
    """The clashing limits in words."""
    limits = study.request.limits
    values = {
        "vram": "the model must fit the GPUs of one replica",
        "ttft": f"TTFT p95 <= {format_duration(limits.ttft_s or 0)}",
        "tpot": f"TPOT <= {format_duration(limits.tpot_s or 0)}",
        "e2e": f"E2E <= {format_duration(limits.e2e_s or 0)}",
        "max_accuracy_loss": f"expected accuracy loss <= {limits.max_accuracy_loss_percent:g}%",
        "budget": f"at most ${limits.budget_usd_per_hour or 0:g}/h",
        "max_gpus": f"at most {limits.max_gpus} GPUs",
        "quota": "no more machines than there are",
        "min_throughput": f"at least {limits.min_throughput_tokens_per_s or 0:g} tokens/s",
    }
    return tuple(f"{FLAGS[n]}: {values[n]}" for n in names)


def nothing_at_all(study: Study) -> tuple[str, ...]:
    """Why there is no configuration whatever the limits: the load, where legal ones fail at it; else the reasons candidates were left
    out, most frequent first."""
    overloaded = study.pruned.get(OVERLOADED, 0)
    if overloaded:
        most = f", the best of them {study.capacity_per_s:.3g} requests/s" if study.capacity_per_s else ""
        return (
            f"{describe_load(study.request)} is more than any of {overloaded} configurations carries, each with up to {MAX_REPLICAS} replicas{most}",
        )
    reasons = sorted(study.pruned.items(), key=lambda kv: -kv[1])
    return tuple(f"{reason} ({count}x)" for reason, count in reasons[:5]) or ("no machine matches the request",)


def relaxation(study: Study, name: LimitName, row: int, answer: Answer) -> Relaxation:
    """The smallest value of one limit that makes the request feasible, rounded so that it really does."""
    rows, limits = study.problem.rows, study.request.limits
    offers = study.problem.offers

    def ms(us: int) -> float:
        return -(-us // 100) / 10

    if name == "vram":
        at = int(study.placed.row[row])
        have, need = study.rows.capacity_bytes[at] / GIB, study.rows.required_bytes[at] / GIB
        return Relaxation(FLAGS[name], round(float(have), 1), round(float(need) + 0.05, 1), "GiB per GPU")
    if name in TIMES:
        return Relaxation(FLAGS[name], study.problem.limits[name] / 1e3, ms(int(rows.metrics[name][row])), "ms")
    if name == "max_accuracy_loss":
        return Relaxation(
            FLAGS[name], limits.max_accuracy_loss_percent, -(-int(rows.metrics[name][row]) // 100) / 100, "%"
        )
    if name == "budget":
        cost = sum(offers[o].micro_usd_per_hour * n for o, n in answer.machines.items())
        return Relaxation(FLAGS[name], limits.budget_usd_per_hour or 0, -(-cost // 10_000) / 100, "USD/h")
    if name == "max_gpus":
        return Relaxation(
            FLAGS[name], limits.max_gpus or 0, sum(offers[o].gpus * n for o, n in answer.machines.items()), "GPUs"
        )
    if name == "quota":
        most = sum(offers[o].limit or 0 for o in answer.machines)
        return Relaxation(FLAGS[name], most, sum(answer.machines.values()), "machines")
    tokens = int(rows.tokens_milli_per_s[row]) * answer.replicas
    return Relaxation(FLAGS[name], limits.min_throughput_tokens_per_s or 0, tokens // 1000, "tokens/s")


def lighter_load(
    request: ServeRequest, model: ModelSpec, catalog: Catalog, clash: Sequence[LimitName]
) -> list[Relaxation]:
    """The highest load that all limits allow, by bisection over whole solves; empty when even an idle system fails."""
    from planner.solver.lighter import highest_load

    if not clash or request.goal == "throughput":
        return []
    now = request.workload.concurrency or request.workload.rate_per_s or 0.0
    best = highest_load(request, model, catalog)
    if best is None or best >= now or best < WORTH_OFFERING * now:
        return []
    users = request.workload.concurrency is not None
    return [Relaxation("--concurrency" if users else "--rate", now, best, "users" if users else "requests/s")]


def accuracy_note(name: str) -> str:
    """Where the accuracy figure of a precision comes from."""
    return precision_of(name).accuracy_source

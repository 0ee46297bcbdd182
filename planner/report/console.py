"""What a person sees on the console: results to stdout, complaints to stderr. Rich is loaded only for tables."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import PlannerError
from planner.plan import Cost, Deployment, MemoryUse, Plan, Range
from planner.report import training
from planner.report.validated import validation_lines
from planner.units import format_duration

if TYPE_CHECKING:
    from planner.solver.compare import Choice
    from planner.solver.single import Estimate, MemoryReport

WIDTH = 110


def say(text: str) -> None:
    """One line to stdout."""
    sys.stdout.write(text + "\n")


def complain(text: str) -> None:
    """One line to stderr."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"planner: {text}\n")
        sys.stderr.flush()


def say_json(value: Any) -> None:
    """JSON to stdout."""
    import json

    say(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def wrapped(text: str, indent: str = "  ") -> str:
    """A paragraph at the width of a console."""
    import textwrap

    return textwrap.fill(
        text, WIDTH, initial_indent=indent + "- ", subsequent_indent=indent + "  ", break_long_words=False
    )


def machines(d: Deployment) -> str:
    """Which machines, where."""
    return " + ".join(
        f"{o.count} x {o.provider} {o.instance_type} ({o.gpus_per_instance}x {o.gpu}) in {o.region}, {o.tier}"
        if o.tier != "owned"
        else f"{o.count} x own machine with {o.gpus_per_instance}x {o.gpu}"
        for o in d.offers
    )


def configuration(d: Deployment) -> str:
    """How it runs, in one line."""
    if d.train is not None:
        return training.configuration(d)
    axes = [f"TP {d.tensor_parallel}", f"PP {d.pipeline_parallel}", *_more_axes(d)]
    axes.append(f"{d.data_parallel} replica{'s' if d.data_parallel > 1 else ''}")
    return f"{d.engine} {d.engine_version}, weights {d.precision}, KV cache {d.kv_cache_dtype}, {', '.join(axes)} ({d.gpus} GPUs in use)"


def _more_axes(d: Deployment) -> list[str]:
    groups = d.serve.attention_data_parallel if d.serve is not None else 1
    return [f"{name} {n}" for name, n in (("EP", d.expert_parallel), ("attention DP", groups)) if n > 1]


def brief(d: Deployment) -> str:
    """The configuration of an alternative in a few words."""
    if d.train is not None:
        more = "".join(f" {name} {n}" for name, n in (("CP", d.context_parallel), ("EP", d.expert_parallel)) if n > 1)
        axes = f"TP {d.tensor_parallel} PP {d.pipeline_parallel}{more} DP {d.data_parallel}"
        return f"{d.engine} {axes} ZeRO-{d.train.zero_stage}"
    stages = [f"PP {d.pipeline_parallel}"] if d.pipeline_parallel > 1 else []
    degrees = " ".join([f"TP {d.tensor_parallel}", *stages, *_more_axes(d)])
    return f"{d.engine} {d.precision}, KV cache {d.kv_cache_dtype}, {degrees}"


def span(r: Range, scale: float = 1e-3) -> str:
    """A latency with its 80% interval (r in ms)."""
    return (
        f"{format_duration(r.value * scale)}  ({format_duration(r.low * scale)} .. {format_duration(r.high * scale)})"
    )


def rate(r: Range, unit: str) -> str:
    """A rate with its 80% interval."""
    return f"{r.value:,.1f} {unit}  ({r.low:,.1f} .. {r.high:,.1f})"


def predictions(p: dict[str, Range]) -> list[str]:
    """The predictions, one line each."""
    if "step_time_s" in p:
        return training.predictions(p)
    lines = [
        f"TTFT p95    {span(p['ttft_ms'])}",
        f"TPOT        {span(p['tpot_ms'])}",
        f"E2E         {span(p['e2e_ms'])}",
    ]
    lines.append(f"throughput  {rate(p['throughput_tokens_per_s'], 'output tokens/s at this load')}")
    if "capacity_requests_per_s" in p:
        lines.append(
            f"capacity    {rate(p['capacity_requests_per_s'], 'requests/s before the queue grows without end')}"
        )
    return lines


def memory_lines(m: MemoryUse) -> list[str]:
    """Memory of the fullest GPU, part by part."""
    return [
        f"weights {m.weights_gib:.2f} + KV cache {m.kv_cache_gib:.2f} + activations {m.activations_gib:.2f} + runtime {m.runtime_gib:.2f}"
        f" = {m.total_gib:.2f} of {m.gpu_usable_gib:.2f} GiB; the cache holds {m.kv_cache_tokens:,} tokens per replica"
    ]


def money(d: Deployment, c: Cost) -> str:
    """What it costs."""
    if d.train is not None:
        return training.money(d, c)
    if all(o.tier == "owned" for o in d.offers):
        return "own machines (0 USD/h counted)"
    million = c.usd_per_million_output_tokens
    tail = f", ${million:,.2f} per million output tokens at this load" if million is not None else ""
    return f"${c.usd_per_hour:,.2f}/h{tail}"


def show_plan(plan: Plan, *, json: bool, written: Sequence[Path]) -> None:
    """The answer of solve."""
    if json:
        from planner.plan import plan_to_dict

        say_json(plan_to_dict(plan))
    elif plan.deployment is None:
        _show_infeasible(plan)
    else:
        _show_answer(plan)
    if written and not json:
        say(f"Wrote {len(written)} files to {written[0].parent}/: {', '.join(p.name for p in written)}")


def _block(title: str, lines: Sequence[str], bullets: bool = True) -> None:
    if lines:
        say(title)
        for line in lines:
            say(wrapped(line) if bullets else f"  {line}")


def _model_line(plan: Plan) -> str:
    m = plan.model
    active = f", {m.params_active / 1e9:.2f}B active" if m.moe else ""
    name = m.hf_id or m.name
    return f"{name}: {m.params_total / 1e9:.2f}B parameters{active}, {m.layers} layers, context {m.max_context:,}"


def _show_answer(plan: Plan) -> None:
    d, c = plan.deployment, plan.cost
    if d is None or c is None or plan.memory is None:
        raise PlannerError("the plan has no deployment to show")
    goal = plan.request.get("goal", "cheapest")
    proof = {"optimal": "proved optimal over the catalog", "feasible": "NOT proved optimal: the time limit came first"}[
        plan.status
    ]
    say(f"{_model_line(plan)}")
    say(f"Goal {goal}: {proof} ({plan.solver.candidates:,} candidates, {plan.solver.wall_s:.2f} s)")
    say("")
    say(f"  {machines(d)}")
    say(f"  {configuration(d)}")
    say(f"  {money(d, c)}")
    say("")
    load = "" if d.train is not None else " at the planned load"
    _block(f"Predicted{load} (80% interval):", predictions(plan.predicted), bullets=False)
    if hint := latency_hint(plan):
        say(f"  {hint}")
    memory = training.memory_lines(plan.memory, d) if d.train is not None else memory_lines(plan.memory)
    _block("Memory per GPU:", memory, bullets=False)
    _block("What holds this answer where it is:", plan.binding)
    _block("Assumed:", plan.assumptions)
    _block("Beware:", plan.warnings)
    if plan.validation:
        _block("Validated:", validation_lines(plan.validation))
    if plan.alternatives:
        say("Alternatives:")
        for a in plan.alternatives:
            say(wrapped(f"{a.kind}: {machines(a.deployment)}; {brief(a.deployment)}: {a.why_not}"))


def latency_hint(plan: Plan) -> str:
    """One line where a serving request left every latency open; empty where it limits one, or asks for the fastest answer."""
    limits = dict(plan.request.get("limits") or {})
    asked = any(limits.get(name) is not None for name in ("ttft_s", "tpot_s", "e2e_s"))
    if plan.task != "serve" or asked or plan.request.get("goal") == "fastest":
        return ""
    return "No latency was limited, so it may be long: --latency 500ms (TTFT p95), --tpot 50ms and --e2e 10s limit it."


def _show_infeasible(plan: Plan) -> None:
    say(_model_line(plan))
    proved = plan.solver.status == "INFEASIBLE"
    say(
        "No plan keeps all limits."
        if proved
        else "No plan was found, and the time ended before a proof that there is none."
    )
    if plan.infeasible is None:
        raise PlannerError("the plan does not say why it is infeasible")
    _block("These clash:", plan.infeasible.core)
    changes = [
        f"{r.limit}: from {r.current:g} to {r.needed:g} {r.unit}"
        if isinstance(r.current, float | int) and isinstance(r.needed, float | int)
        else f"{r.limit}: {r.needed}"
        for r in plan.infeasible.relaxations
    ]
    if changes:
        _block("Smallest single change that makes it feasible (any one of):", changes)
    else:
        say("No single limit, relaxed alone, makes it feasible.")
    _block("Assumed:", plan.assumptions)


def show_choices(choices: Sequence[Choice], shape: str, *, total: int) -> None:
    """The comparison as table, json, csv or markdown."""
    header, rows = _choice_table(choices)
    if shape == "json":
        say_json([asdict(c) for c in choices])
    elif shape == "csv":
        import csv

        csv.writer(sys.stdout, lineterminator="\n").writerows(_raw_table(choices))
    elif shape == "markdown":
        say(f"| {' | '.join(header)} |")
        say(f"|{'|'.join('---' for _ in header)}|")
        for row in rows:
            say(f"| {' | '.join(row)} |")
    elif not rows:
        say("No instance type keeps the limits. `planner solve` with the same options explains why.")
    else:
        _print_table(header, rows)
        if total > len(choices):
            say(f"{len(choices)} of {total} instance types; --top 0 shows all.")


def _choice_table(choices: Sequence[Choice]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a comparison; the note column only when any choice has one."""
    trains = bool(choices) and choices[0].deployment.train is not None
    header = ["provider", "instance", "n", "GPUs", *(training.COLUMNS if trains else SERVE_COLUMNS), "note"]
    rows = []
    for c in choices:
        d = c.deployment
        gpus = f"{sum(o.count * o.gpus_per_instance for o in d.offers)}x {d.offers[0].gpu}"
        cells = training.cells(c) if trains else _serve_cells(c)
        rows.append([c.provider, c.instance_type, str(sum(o.count for o in d.offers)), gpus, *cells, c.note])
    if not any(row[-1] for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    return header, rows


def _raw_table(choices: Sequence[Choice]) -> list[list[object]]:
    """Header and rows for other programs: plain numbers, the unit in the name of the column."""
    metrics = list(choices[0].predicted) if choices else []
    first = ["provider", "instance", "machines", "gpus", "gpu", "usd_per_hour", "usd_total", "engine", "precision"]
    layout = ["kv_cache_dtype", "tensor_parallel", "pipeline_parallel", "data_parallel"]
    table: list[list[object]] = [[*first, *layout, *metrics, "fits", "note"]]
    for c in choices:
        d = c.deployment
        machines_taken, gpus = sum(o.count for o in d.offers), sum(o.count * o.gpus_per_instance for o in d.offers)
        where = [c.provider, c.instance_type, machines_taken, gpus, d.offers[0].gpu, c.cost.usd_per_hour]
        axes = [d.kv_cache_dtype, d.tensor_parallel, d.pipeline_parallel, d.data_parallel]
        values = [c.predicted[name].value for name in metrics]
        table.append([*where, c.cost.usd_total, d.engine, d.precision, *axes, *values, c.fits, c.note])
    return table


SERVE_COLUMNS = ["$/h", "$/M out", "engine", "weights", "KV", "TP", "PP", "DP", "TTFT p95", "TPOT", "E2E", "tok/s"]


def _serve_cells(c: Choice) -> list[str]:
    d, p, million = c.deployment, c.predicted, c.cost.usd_per_million_output_tokens
    return [
        f"{c.cost.usd_per_hour:.2f}",
        "" if million is None else f"{million:.2f}",
        d.engine,
        d.precision,
        d.kv_cache_dtype,
        str(d.tensor_parallel),
        str(d.pipeline_parallel),
        str(d.data_parallel),
        format_duration(p["ttft_ms"].value / 1e3),
        format_duration(p["tpot_ms"].value / 1e3),
        format_duration(p["e2e_ms"].value / 1e3),
        f"{p['throughput_tokens_per_s'].value:.0f}",
    ]


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns padded to their widest cell: readable at any width, and greppable."""
    widths = [max(len(str(r[i])) for r in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        say("  ".join(str(cell).ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())


def show_estimate(e: Estimate, *, json: bool) -> None:
    """One configuration."""
    if json:
        say_json(asdict(e))
        return
    say(f"  {machines(e.deployment)}")
    say(f"  {configuration(e.deployment)}")
    say(f"  {money(e.deployment, e.cost)}")
    if not e.fits:
        say(
            f"DOES NOT FIT: needs {e.required_gib:.2f} GiB per GPU, {e.capacity_gib:.2f} GiB may be used. The times below assume that it did."
        )
    trains = e.deployment.train is not None
    _block("Predicted (80% interval):", predictions(e.predicted), bullets=False)
    _block(
        "Memory per GPU:",
        training.memory_lines(e.memory, e.deployment) if trains else memory_lines(e.memory),
        bullets=False,
    )
    _block("Assumed:", e.assumptions)
    _block("Beware:", e.warnings)


def show_memory(r: MemoryReport, *, json: bool) -> None:
    """The calculator people look for."""
    if json:
        say_json(asdict(r))
        return
    say(r.title)
    _print_table(["part", "GiB per GPU"], [[name, f"{gib:.2f}"] for name, gib in r.parts])
    if r.host_parts:
        _print_table(["in host memory", "GiB per machine"], [[name, f"{gib:.2f}"] for name, gib in r.host_parts])
    say(
        ("FITS" if r.fits else "DOES NOT FIT")
        + f": {r.required_gib:.2f} GiB needed, {r.capacity_gib:.2f} GiB may be used of {r.usable_gib:.2f} GiB."
    )
    for line in r.notes:
        say(wrapped(line))

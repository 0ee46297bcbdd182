"""LAUNCH.md: what was planned, how to start it, how to check it, what is not emitted and why."""

from __future__ import annotations

import json
import shlex

from planner.emit.balancer import LISTEN, endpoints
from planner.emit.layout import Layout
from planner.emit.text import HEADER
from planner.plan import Plan
from planner.plan_seal import EDITED, was_edited


def table_row(name: str, value: object) -> str:
    """One row of a Markdown table of two columns."""
    return f"| {name} | {str(value).replace('|', chr(92) + '|')} |"


def figures(plan: Plan, money: str) -> list[str]:
    """Rows of what is predicted and what it costs (money; '' = not said); of an edited plan one that says they are not of this deployment."""
    if was_edited(plan):
        return [table_row("predicted", f"not for this deployment: {EDITED}. Solve or estimate again.")]
    rows = [table_row(name, f"{r.value:.4g} ({r.low:.4g} to {r.high:.4g})") for name, r in plan.predicted.items()]
    return [*rows, table_row("cost", money)] if money else rows


def launch_md(layout: Layout, names: list[str], skipped: dict[str, str]) -> str:
    """The notes. names: the files written beside it; skipped: target -> reason."""
    dep, plan, serve = layout.deployment, layout.plan, layout.serve
    parallel = f"tensor {dep.tensor_parallel}, pipeline {dep.pipeline_parallel}, expert {dep.expert_parallel}"
    rows = [
        table_row("model", f"`{layout.model}` ({plan.model.params_total / 1e9:.1f} B parameters)"),
        table_row("engine", f"{layout.facts['title']} {dep.engine_version}{_image(layout)}"),
        table_row("precision", f"{dep.precision}, KV cache {dep.kv_cache_dtype}"),
        table_row("parallel", f"{parallel}, replicas {dep.data_parallel}"),
        table_row("at once", f"{serve.max_num_seqs} requests, {serve.max_num_batched_tokens} tokens a step"),
        table_row("context", f"{serve.max_model_len} tokens"),
    ]
    for offer in dep.offers:
        machine = f"{offer.count}x {offer.instance_type} ({offer.gpus_per_instance}x {offer.gpu})"
        where = f"{offer.provider} {offer.region} {offer.tier}"
        price = f"{where}, {offer.usd_per_hour:.2f} USD/h each, seen {offer.observed_at}"
        rows.append(table_row("machines", f"{machine}, {'your own' if layout.owned else price}"))
    money = f"{plan.cost.usd_per_hour:.2f} USD/h" if plan.cost is not None and not layout.owned else ""
    rows += figures(plan, money)
    return "\n".join(
        [
            f"<!-- {HEADER} -->",
            f"# {layout.label}",
            "",
            "| | |",
            "|---|---|",
            *rows,
            "",
            "## Before",
            "",
            *_before(layout),
            "",
            "## Start",
            "",
            *_start(layout, names),
            "",
            "## Check",
            "",
            *_check(layout),
            "",
            *not_written(skipped),
        ]
    )


def _image(layout: Layout) -> str:
    """The container; processes on a CPU run without one."""
    return "" if layout.vendor == "cpu" else f", image `{layout.image[0]}`"


def _before(layout: Layout) -> list[str]:
    lines = []
    if layout.checkpoint:
        lines.append(
            f"* MODEL must be {layout.checkpoint} of this model; set the variable MODEL to its hub id or folder."
        )
    if layout.gated:
        lines.append("* The hub may ask for an accepted licence: accept it, then `export HF_TOKEN=...`.")
    if layout.packages:
        lines.append(
            f"* {'Install' if layout.vendor == 'cpu' else 'Without a container'}: `python3 -m pip install {' '.join(shlex.quote(p) for p in layout.packages)}`."
        )
    else:
        lines.append(f"* The engine runs in its container, `{layout.image[0]}`.")
    if layout.vendor != "cpu" and not layout.image[1]:
        lines.append("* The image tag was not checked; pull it first.")
    if layout.spec.batching == "static":
        lines.append("* Static batching: a batch runs to its longest answer before the next one starts.")
    if layout.deployment.engine == "tgi":
        lines.append(
            "* Text Generation Inference is archived: no new models or fixes; plan new work on vLLM or SGLang."
        )
    return lines


def _start(layout: Layout, names: list[str]) -> list[str]:
    how = {
        "serve.sh": "on the machine"
        if layout.machines == 1
        else f"on each of {layout.machines} machines, MACHINE_INDEX=0, 1, ...",
        "docker-compose.yaml": "`docker compose up -d`",
        "kubernetes.yaml": "`kubectl apply -f kubernetes.yaml`",
        "serve.slurm": "`sbatch serve.slurm`",
        "balancer.conf": f"one address ({LISTEN}) for all replicas, with nginx",
        "monitor.sh": "`bash monitor.sh smi`, `health`, ...",
    }
    lines = []
    for name in names:
        text = (
            f"`sky launch {name} --env HF_TOKEN`"
            if name.startswith("skypilot")
            else how.get(name, "used by the scripts")
        )
        lines.append(f"* `{name}`: {text if name != 'serve.sh' else '`bash serve.sh` ' + text}")
    if layout.nodes_per_replica > 1:
        lines.append(
            "* A replica spans several machines: give each HOSTS, all addresses in the order of MACHINE_INDEX."
        )
    return lines


def _check(layout: Layout) -> list[str]:
    base = f"http://127.0.0.1:{layout.port}"
    body = json.dumps(
        {"model": layout.model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}
    )
    lines = ["```bash", f"curl -fsS {base}{layout.facts['health']}"]
    lines.append(f"curl -fsS {base}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}")
    lines.append("```")
    found = endpoints(layout)
    if len(found) > 1:
        lines += ["", f"Replicas answer on {', '.join(found)}; balance them with balancer.conf."]
    return lines


def not_written(skipped: dict[str, str]) -> list[str]:
    """The section on targets that were left out."""
    if not skipped:
        return []
    return ["## Not written", "", *[f"* {target}: {reason}." for target, reason in skipped.items()], ""]

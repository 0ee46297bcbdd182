"""serve.sh: the frame every engine shares (settings, machines, replicas), with the engine's own command inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.emit.layout import Layout, cpu_exports
from planner.emit.text import HEADER, Shell, Word, comment, options, word

MODEL, SERVED = Shell('"$MODEL"'), Shell('"$SERVED_NAME"')
HOST, PORT = Shell('"$BIND_ADDRESS"'), Shell('"$port"')


def beside(name: str) -> Shell:
    """A file that lies beside serve.sh."""
    return Shell(f'"$here/{name}"')


def rendezvous_port() -> Shell:
    """Where the processes of one replica meet on this machine: MASTER_PORT (29500) + replica."""
    return Shell('"$((${MASTER_PORT:-29500} + replica))"')


@dataclass(frozen=True)
class Command:
    """What an engine starts. program: words before the options; options: one list a line; tail: after the options.

    more: shell lines that add to `args` before the start (node ranks). native_replicas: the engine itself runs and
    balances the replicas of a machine behind one port, given $REPLICAS. installs: INSTALL=1 runs pip first.
    """

    program: Sequence[Word]
    options: Sequence[Sequence[Word]]
    more: str = ""
    native_replicas: bool = False
    installs: bool = False


def _about(layout: Layout) -> list[str]:
    dep = layout.deployment
    lines = [
        HEADER,
        f"Serves {layout.model} with {layout.facts['title']} {dep.engine_version} in {dep.precision}:",
        f"tensor parallel {dep.tensor_parallel}, pipeline {dep.pipeline_parallel}, replicas {layout.replicas},",
        f"{layout.machines} machine(s) of {layout.offer.gpus_per_instance}x {layout.offer.gpu}.",
    ]
    if layout.checkpoint:
        lines.append(f"MODEL must be {layout.checkpoint}; the engine does not convert plain weights.")
    if layout.gated:
        lines.append(
            "The hub may ask for an accepted licence for this model: export HF_TOKEN of an account that has it."
        )
    lines.append("Environment: MODEL (hub id or folder), SERVED_NAME, BIND_ADDRESS, PORT, REPLICAS (here), EXTRA_ARGS.")
    if layout.nodes_per_replica > 1:
        lines.append(
            "A replica spans machines. Run this on each with MACHINE_INDEX (0, 1, ...) and HOSTS (all addresses, in"
        )
        lines.append("that order), or with NODE_RANK (within the replica) and MASTER_ADDR (address of its rank 0).")
    elif layout.machines > 1:
        lines.append("Run this on each machine with its own MACHINE_INDEX (0, 1, ...).")
    return lines


def _model_line(layout: Layout) -> str:
    """MODEL defaults to the planned one, or is demanded when the plan knows no checkpoint in the planned format."""
    if layout.checkpoint is None:
        return 'MODEL="${MODEL:-$planned_model}"'
    return f'MODEL="${{MODEL:?set it to {layout.checkpoint} (hub id or folder)}}"'


def _settings(layout: Layout) -> str:
    """Variables with the plan's values as defaults, and which share of the plan runs on this machine."""
    lines = [
        f"planned_model={word(layout.model)}",
        _model_line(layout),
        'SERVED_NAME="${SERVED_NAME:-$planned_model}"',
        'BIND_ADDRESS="${BIND_ADDRESS:-0.0.0.0}"',
        f'PORT="${{PORT:-{layout.port}}}"',
        'read -r -a extra <<<"${EXTRA_ARGS:-}"',
    ]
    if layout.nodes_per_replica > 1:
        lines.append(_NODE_BLOCK.format(nodes=layout.nodes_per_replica))
    elif layout.machines > 1:
        lines.append(_SHARE_BLOCK.format(replicas=layout.replicas, share=layout.replicas_per_machine))
    else:
        lines.append(f'REPLICAS="${{REPLICAS:-{layout.replicas}}}"')
    return "\n".join(lines)


_HERE = 'here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\n'

_SHARE_BLOCK = """MACHINE_INDEX="${{MACHINE_INDEX:-${{SLURM_NODEID:-0}}}}"
left=$(({replicas} - MACHINE_INDEX * {share}))
REPLICAS="${{REPLICAS:-$((left < {share} ? left : {share}))}}"
if ((REPLICAS < 1)); then
    echo "nothing to start on machine $MACHINE_INDEX" >&2
    exit 2
fi"""

_NODE_BLOCK = """MACHINE_INDEX="${{MACHINE_INDEX:-${{SLURM_NODEID:-0}}}}"
NODE_RANK="${{NODE_RANK:-$((MACHINE_INDEX % {nodes}))}}"
MASTER_ADDR="${{MASTER_ADDR:-}}"
MASTER_PORT="${{MASTER_PORT:-29501}}"
if [[ -z "$MASTER_ADDR" && -n "${{HOSTS:-}}" ]]; then
    read -r -a hosts <<<"${{HOSTS//$'\\n'/ }}"
    MASTER_ADDR="${{hosts[MACHINE_INDEX - NODE_RANK]}}"
fi
if [[ -z "$MASTER_ADDR" ]]; then
    echo "set MASTER_ADDR to the address of this replica's first machine, or HOSTS to all addresses" >&2
    exit 2
fi"""


def _run_block(layout: Layout, command: Command) -> str:
    """Start one process, or one a replica with its own GPUs and port."""
    if command.native_replicas or layout.replicas_per_machine == 1:
        return 'start_replica 0 "$PORT"'
    first, gpus = _gpu_share(layout)
    return f"""if ((REPLICAS == 1)); then
    start_replica 0 "$PORT"
fi

# One process a replica, each with its own {"cores" if layout.vendor == "cpu" else "GPUs"} and its own port: PORT, PORT + 1, ...
pids=()
stop() {{
    trap - INT TERM EXIT
    kill "${{pids[@]}}" 2>/dev/null || true
    wait "${{pids[@]}}" 2>/dev/null || true
}}
trap 'stop; exit 143' INT TERM
trap stop EXIT
for ((replica = 0; replica < REPLICAS; replica++)); do
{first}    (
        trap - INT TERM EXIT
{gpus}        start_replica "$replica" "$((PORT + replica))"
    ) &
    pids+=("$!")
done
wait -n # one replica ending ends all: a supervisor then restarts the whole"""


def _gpu_share(layout: Layout) -> tuple[str, str]:
    """Lines before and at the start of a replica that give it its own GPUs; none on a CPU."""
    if layout.vendor == "cpu":
        return "", ""
    visible = "HIP_VISIBLE_DEVICES" if layout.vendor == "amd" else "CUDA_VISIBLE_DEVICES"
    each = layout.gpus_per_replica
    first = f'    first=$((replica * {each}))\n    gpus=$(seq -s, "$first" "$((first + {each} - 1))")\n'
    return first, f'        export {visible}="$gpus"\n'


def serve_sh(layout: Layout, command: Command) -> str:
    """The text of serve.sh. Environment variables override the plan's model, port, host and replicas."""
    install = ""
    if command.installs:
        packages = " ".join(word(p) for p in layout.packages)
        install = f'if [[ "${{INSTALL:-0}}" == 1 ]]; then python3 -m pip install --quiet {packages}; fi\n\n'
    program = " ".join(word(w) for w in command.program)
    more = "".join(f"    {line}\n" for line in command.more.splitlines())
    return f"""#!/usr/bin/env bash
{comment(_about(layout))}
set -euo pipefail
{_HERE if any("$here/" in str(w) for row in command.options for w in row) else ""}
{_settings(layout)}
{cpu_exports(layout.offer.cpu_threads) if layout.offer.cpu_threads else ""}
{install}start_replica() {{ # replica index on this machine, port
    local replica="$1" port="$2"
    local -a args=(
{options(command.options, "        ")}
    )
{more}    echo "replica $replica on port $port" >&2
    exec {program} "${{args[@]}}" "${{extra[@]}}"
}}

{_run_block(layout, command)}
"""

"""launch.sh: starts the training script on one machine, or on this machine of several."""

from __future__ import annotations

from planner.emit.layout import cpu_exports
from planner.emit.text import HEADER, comment, word
from planner.emit.train.layout import TrainLayout

_ADDRESS = """MACHINE_INDEX="${MACHINE_INDEX:-${SLURM_NODEID:-}}"
if [[ -z "${MASTER_ADDR:-}" && -n "${HOSTS:-}" ]]; then
    read -r -a hosts <<<"${HOSTS//$'\\n'/ }"
    MASTER_ADDR="${hosts[0]}"
fi"""


def _about(laid: TrainLayout) -> list[str]:
    dep, train = laid.deployment, laid.train
    lines = [
        HEADER,
        f"Trains {laid.model} ({train.method}) with {laid.title} {dep.engine_version} in {dep.precision}:",
        f"{dep.gpus} processes on {laid.machines} machine(s) of {laid.offer.gpus_per_instance}x {laid.offer.gpu};",
        f"tensor {dep.tensor_parallel}, pipeline {dep.pipeline_parallel}, data {dep.data_parallel}, ZeRO {train.zero_stage}, micro-batch {train.micro_batch_size},",
        f"accumulation {train.gradient_accumulation_steps}, checkpoint interval {train.checkpoint_interval}, offload {train.offload}.",
        "Environment: DATASET (needed), MODEL, OUTPUT_DIR, EXTRA_ARGS, MASTER_PORT.",
    ]
    if laid.engine in ("deepspeed", "fsdp2"):
        lines.append("To fit: MICRO_BATCH_SIZE, GRADIENT_ACCUMULATION_STEPS, CHECKPOINT_INTERVAL.")
    if laid.gated:
        lines.append("The hub asks for an accepted licence for this model: export HF_TOKEN of an account that has it.")
    if laid.machines > 1:
        lines.append(
            "On each machine: MACHINE_INDEX (0, 1, ...) and MASTER_ADDR (or HOSTS, all addresses in that order)."
        )
        if laid.engine == "deepspeed":
            lines.append(
                "Or once, over ssh: a file `hostfile` beside this script (see hostfile.example), no MACHINE_INDEX."
            )
            lines.append("Over ssh, variables such as HF_TOKEN go into ~/.deepspeed_env of the first machine.")
    return lines


def _torchrun(laid: TrainLayout) -> str:
    if laid.machines == 1:
        return (
            f"exec torchrun --nnodes 1 --nproc-per-node {laid.gpus_per_machine} --master-addr 127.0.0.1 "
            '--master-port "$MASTER_PORT" "${script[@]}"'
        )
    return (
        f"exec torchrun --nnodes {laid.machines} --nproc-per-node {laid.gpus_per_machine} \\\n"
        '    --node-rank "$MACHINE_INDEX" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "${script[@]}"'
    )


def _start(laid: TrainLayout) -> str:
    """The lines that start the processes."""
    several = laid.machines > 1
    need = 'if [[ -z "$MACHINE_INDEX" || -z "${MASTER_ADDR:-}" ]]; then\n    echo "set MACHINE_INDEX and MASTER_ADDR (or HOSTS)" >&2\n    exit 2\nfi'
    if laid.engine == "deepspeed":
        if not several:
            return f'exec deepspeed --num_gpus {laid.gpus_per_machine} --master_port "$MASTER_PORT" --no_local_rank "${{script[@]}}"'
        ssh = (
            'if [[ -z "$MACHINE_INDEX" && -f "$here/hostfile" ]]; then\n'
            f'    exec deepspeed --hostfile "$here/hostfile" --num_nodes {laid.machines} --num_gpus {laid.gpus_per_machine} \\\n'
            '        --master_port "$MASTER_PORT" --no_local_rank "${script[@]}"\nfi'
        )
        return f"{_ADDRESS}\n{ssh}\n{need}\n{_torchrun(laid)}"
    if laid.engine == "fsdp2" and laid.vendor != "cpu":
        ranks = '    --machine_rank "$MACHINE_INDEX" --main_process_ip "$MASTER_ADDR"' if several else "   "
        accelerate = (
            'if [[ "${LAUNCHER:-accelerate}" == accelerate ]]; then\n'
            '    exec accelerate launch --config_file "$here/accelerate.yaml" --main_process_port "$MASTER_PORT" \\\n'
            f'    {ranks} "${{extra_launch[@]}}" "${{script[@]}}"\nfi'
        )
        head = f"{_ADDRESS}\n{need}\n" if several else ""
        return f"{head}# LAUNCHER=torchrun starts the same script without accelerate's launcher\n{accelerate}\n{_torchrun(laid)}"
    return (f"{_ADDRESS}\n{need}\n" if several else "") + _torchrun(laid)


def _data(laid: TrainLayout) -> str:
    if laid.engine == "megatron_bridge":
        return "the prefix of a .bin/.idx pair, or mock"
    return "a .txt, .jsonl or .parquet file, a folder of them, or a hub name"


def _exports(laid: TrainLayout) -> str:
    if laid.engine in ("deepspeed", "fsdp2"):
        return ""
    return 'export MODEL OUTPUT_DIR DATASET PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"\n'


def launch_sh(laid: TrainLayout, script: list[str], install: bool = True) -> str:
    """The text of launch.sh. script: words of the program and its options, as shell."""
    lines = "\n".join(f"    {part}" for part in script)
    launcher = laid.engine == "fsdp2" and laid.vendor != "cpu"
    extra = 'read -r -a extra_launch <<<"${LAUNCH_ARGS:-}"\n' if launcher else ""
    packages = " ".join(word(p) for p in laid.packages)
    setup = (
        f'if [[ "${{INSTALL:-0}}" == 1 ]]; then python3 -m pip install --quiet {packages}; fi\n\n' if install else ""
    )
    return f"""#!/usr/bin/env bash
{comment(_about(laid))}
set -euo pipefail
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
planned_model={word(laid.model)}
MODEL="${{MODEL:-$planned_model}}"
OUTPUT_DIR="${{OUTPUT_DIR:-output}}"
MASTER_PORT="${{MASTER_PORT:-29500}}"
{cpu_exports(laid.offer.cpu_threads) if laid.offer.cpu_threads else ""}{_exports(laid)}if [[ -z "${{DATASET:-}}" ]]; then
    echo "set DATASET to {_data(laid)}" >&2
    exit 2
fi
read -r -a extra <<<"${{EXTRA_ARGS:-}}"
{extra}script=(
{lines}
)

{setup}{_start(laid)}
"""


PYTHON_SCRIPT = [
    '"$here/train.py"',
    '--model "$MODEL" --dataset "$DATASET" --output "$OUTPUT_DIR"',
    '${MICRO_BATCH_SIZE:+--micro-batch-size "$MICRO_BATCH_SIZE"}',
    '${GRADIENT_ACCUMULATION_STEPS:+--gradient-accumulation-steps "$GRADIENT_ACCUMULATION_STEPS"}',
    '${CHECKPOINT_INTERVAL:+--checkpoint-interval "$CHECKPOINT_INTERVAL"}',
    '"${extra[@]}"',
]

# torchrun reads a program after -m; the configuration module lies beside launch.sh
TITAN_MODULE = ["-m torchtitan.train", "--module titan_config --config planned", '"${extra[@]}"']
MEGATRON_SCRIPT = ['"$here/megatron_train.py"', '"${extra[@]}"']

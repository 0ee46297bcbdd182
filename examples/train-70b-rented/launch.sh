#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Trains meta-llama/Llama-3.1-70B-Instruct (full) with torchtitan 0.3.0 in bf16:
# 24 processes on 3 machine(s) of 8x b200;
# tensor 1, pipeline 1, data 24, ZeRO 3, micro-batch 1,
# accumulation 10, checkpoint interval 0, offload none.
# Environment: DATASET (needed), MODEL, OUTPUT_DIR, EXTRA_ARGS, MASTER_PORT.
# The hub asks for an accepted licence for this model: export HF_TOKEN of an account that has it.
# On each machine: MACHINE_INDEX (0, 1, ...) and MASTER_ADDR (or HOSTS, all addresses in that order).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
planned_model=meta-llama/Llama-3.1-70B-Instruct
MODEL="${MODEL:-$planned_model}"
OUTPUT_DIR="${OUTPUT_DIR:-output}"
MASTER_PORT="${MASTER_PORT:-29500}"
export MODEL OUTPUT_DIR DATASET PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
if [[ -z "${DATASET:-}" ]]; then
    echo "set DATASET to a .txt, .jsonl or .parquet file, a folder of them, or a hub name" >&2
    exit 2
fi
read -r -a extra <<<"${EXTRA_ARGS:-}"
script=(
    -m torchtitan.train
    --module titan_config --config planned
    "${extra[@]}"
)

if [[ "${INSTALL:-0}" == 1 ]]; then python3 -m pip install --quiet torchtitan==0.3.0; fi

MACHINE_INDEX="${MACHINE_INDEX:-${SLURM_NODEID:-}}"
if [[ -z "${MASTER_ADDR:-}" && -n "${HOSTS:-}" ]]; then
    read -r -a hosts <<<"${HOSTS//$'\n'/ }"
    MASTER_ADDR="${hosts[0]}"
fi
if [[ -z "$MACHINE_INDEX" || -z "${MASTER_ADDR:-}" ]]; then
    echo "set MACHINE_INDEX and MASTER_ADDR (or HOSTS)" >&2
    exit 2
fi
exec torchrun --nnodes 3 --nproc-per-node 8 \
    --node-rank "$MACHINE_INDEX" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "${script[@]}"

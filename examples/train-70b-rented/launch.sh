#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Trains meta-llama/Llama-3.1-70B-Instruct (full) with Megatron Bridge 0.3.1 in bf16:
# 32 processes on 4 machine(s) of 8x h100-sxm;
# tensor 4, pipeline 4, data 2, ZeRO 1, micro-batch 1,
# accumulation 128, checkpoint interval 0, offload none.
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
    echo "set DATASET to the prefix of a .bin/.idx pair, or mock" >&2
    exit 2
fi
read -r -a extra <<<"${EXTRA_ARGS:-}"
script=(
    "$here/megatron_train.py"
    "${extra[@]}"
)

if [[ "${INSTALL:-0}" == 1 ]]; then python3 -m pip install --quiet megatron-bridge==0.3.1; fi

MACHINE_INDEX="${MACHINE_INDEX:-${SLURM_NODEID:-}}"
if [[ -z "${MASTER_ADDR:-}" && -n "${HOSTS:-}" ]]; then
    read -r -a hosts <<<"${HOSTS//$'\n'/ }"
    MASTER_ADDR="${hosts[0]}"
fi
if [[ -z "$MACHINE_INDEX" || -z "${MASTER_ADDR:-}" ]]; then
    echo "set MACHINE_INDEX and MASTER_ADDR (or HOSTS)" >&2
    exit 2
fi
exec torchrun --nnodes 4 --nproc-per-node 8 \
    --node-rank "$MACHINE_INDEX" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "${script[@]}"

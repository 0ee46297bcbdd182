#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Trains meta-llama/Llama-3.1-8B-Instruct (full) with Megatron Bridge 0.3.1 in bf16:
# 6 processes on 1 machine(s) of 6x h100-sxm;
# tensor 2, pipeline 1, data 3, ZeRO 1, micro-batch 1,
# accumulation 42, checkpoint interval 0, offload none.
# Environment: DATASET (needed), MODEL, OUTPUT_DIR, EXTRA_ARGS, MASTER_PORT.
# The hub asks for an accepted licence for this model: export HF_TOKEN of an account that has it.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
planned_model=meta-llama/Llama-3.1-8B-Instruct
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

exec torchrun --nnodes 1 --nproc-per-node 6 --master-addr 127.0.0.1 --master-port "$MASTER_PORT" "${script[@]}"

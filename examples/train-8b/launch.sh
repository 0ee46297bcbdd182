#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Trains meta-llama/Llama-3.1-8B-Instruct (full) with torchtitan 0.3.0 in bf16:
# 6 processes on 1 machine(s) of 6x h100-sxm;
# tensor 1, pipeline 1, data 3, ZeRO 2, micro-batch 1,
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

exec torchrun --nnodes 1 --nproc-per-node 6 --master-addr 127.0.0.1 --master-port "$MASTER_PORT" "${script[@]}"

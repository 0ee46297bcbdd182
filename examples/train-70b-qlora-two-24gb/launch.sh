#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Trains meta-llama/Meta-Llama-3-70B (qlora) with PyTorch FSDP2 torch 2.13, accelerate 1.15 in bf16:
# 2 processes on 1 machine(s) of 2x rtx-4090;
# tensor 1, pipeline 1, data 2, ZeRO 3, micro-batch 6,
# accumulation 10, checkpoint interval 2, offload optimizer+parameters.
# Environment: DATASET (needed), MODEL, OUTPUT_DIR, EXTRA_ARGS, MASTER_PORT.
# To fit: MICRO_BATCH_SIZE, GRADIENT_ACCUMULATION_STEPS, CHECKPOINT_INTERVAL.
# The hub asks for an accepted licence for this model: export HF_TOKEN of an account that has it.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
planned_model=meta-llama/Meta-Llama-3-70B
MODEL="${MODEL:-$planned_model}"
OUTPUT_DIR="${OUTPUT_DIR:-output}"
MASTER_PORT="${MASTER_PORT:-29500}"
if [[ -z "${DATASET:-}" ]]; then
    echo "set DATASET to a .txt, .jsonl or .parquet file, a folder of them, or a hub name" >&2
    exit 2
fi
read -r -a extra <<<"${EXTRA_ARGS:-}"
read -r -a extra_launch <<<"${LAUNCH_ARGS:-}"
script=(
    "$here/train.py"
    --model "$MODEL" --dataset "$DATASET" --output "$OUTPUT_DIR"
    ${MICRO_BATCH_SIZE:+--micro-batch-size "$MICRO_BATCH_SIZE"}
    ${GRADIENT_ACCUMULATION_STEPS:+--gradient-accumulation-steps "$GRADIENT_ACCUMULATION_STEPS"}
    ${CHECKPOINT_INTERVAL:+--checkpoint-interval "$CHECKPOINT_INTERVAL"}
    "${extra[@]}"
)

if [[ "${INSTALL:-0}" == 1 ]]; then python3 -m pip install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0 peft==0.21.2 bitsandbytes==0.50.2; fi

# LAUNCHER=torchrun starts the same script without accelerate's launcher
if [[ "${LAUNCHER:-accelerate}" == accelerate ]]; then
    exec accelerate launch --config_file "$here/accelerate.yaml" --main_process_port "$MASTER_PORT" \
        "${extra_launch[@]}" "${script[@]}"
fi
exec torchrun --nnodes 1 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port "$MASTER_PORT" "${script[@]}"

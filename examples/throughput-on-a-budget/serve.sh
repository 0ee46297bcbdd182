#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Serves RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8 with SGLang 0.5.23 in int8-w8a8:
# tensor parallel 1, pipeline 1, replicas 29,
# 29 machine(s) of 1x rtx-4090.
# Environment: MODEL (hub id or folder), SERVED_NAME, BIND_ADDRESS, PORT, REPLICAS (here), EXTRA_ARGS.
# Run this on each machine with its own MACHINE_INDEX (0, 1, ...).
set -euo pipefail

planned_model=RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8
MODEL="${MODEL:-$planned_model}"
SERVED_NAME="${SERVED_NAME:-$planned_model}"
BIND_ADDRESS="${BIND_ADDRESS:-0.0.0.0}"
PORT="${PORT:-30000}"
read -r -a extra <<<"${EXTRA_ARGS:-}"
MACHINE_INDEX="${MACHINE_INDEX:-${SLURM_NODEID:-0}}"
left=$((29 - MACHINE_INDEX * 1))
REPLICAS="${REPLICAS:-$((left < 1 ? left : 1))}"
if ((REPLICAS < 1)); then
    echo "nothing to start on machine $MACHINE_INDEX" >&2
    exit 2
fi

start_replica() { # replica index on this machine, port
    local replica="$1" port="$2"
    local -a args=(
        --model-path "$MODEL"
        --served-model-name "$SERVED_NAME"
        --host "$BIND_ADDRESS"
        --port "$port"
        --tp-size 1
        --pp-size 1
        --context-length 4096
        --max-running-requests 64
        --chunked-prefill-size 8192
        --kv-cache-dtype auto
        --enable-metrics
        --dtype bfloat16
        --mem-fraction-static 0.88
    )
    echo "replica $replica on port $port" >&2
    exec python3 -m sglang.launch_server "${args[@]}" "${extra[@]}"
}

start_replica 0 "$PORT"

#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Serves deepseek-ai/DeepSeek-R1 with SGLang 0.5.23 in fp8-block:
# tensor parallel 4, pipeline 2, replicas 1,
# 1 machine(s) of 8x rtx-pro-6000-server.
# Environment: MODEL (hub id or folder), SERVED_NAME, BIND_ADDRESS, PORT, REPLICAS (here), EXTRA_ARGS.
set -euo pipefail

planned_model=deepseek-ai/DeepSeek-R1
MODEL="${MODEL:-$planned_model}"
SERVED_NAME="${SERVED_NAME:-$planned_model}"
BIND_ADDRESS="${BIND_ADDRESS:-0.0.0.0}"
PORT="${PORT:-30000}"
read -r -a extra <<<"${EXTRA_ARGS:-}"
REPLICAS="${REPLICAS:-1}"

start_replica() { # replica index on this machine, port
    local replica="$1" port="$2"
    local -a args=(
        --model-path "$MODEL"
        --served-model-name "$SERVED_NAME"
        --host "$BIND_ADDRESS"
        --port "$port"
        --tp-size 4
        --pp-size 2
        --context-length 4096
        --max-running-requests 64
        --chunked-prefill-size 8192
        --kv-cache-dtype fp8_e4m3
        --enable-metrics
        --dtype bfloat16
        --mem-fraction-static 0.88
    )
    echo "replica $replica on port $port" >&2
    exec python3 -m sglang.launch_server "${args[@]}" "${extra[@]}"
}

start_replica 0 "$PORT"

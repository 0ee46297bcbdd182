#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Serves Qwen/Qwen2.5-32B-Instruct with vLLM 0.33.0 in int4-awq:
# tensor parallel 2, pipeline 1, replicas 1,
# 1 machine(s) of 2x rtx-4090.
# MODEL must be an AWQ 4-bit checkpoint; the engine does not convert plain weights.
# Environment: MODEL (hub id or folder), SERVED_NAME, BIND_ADDRESS, PORT, REPLICAS (here), EXTRA_ARGS.
set -euo pipefail

planned_model=Qwen/Qwen2.5-32B-Instruct
MODEL="${MODEL:?set it to an AWQ 4-bit checkpoint (hub id or folder)}"
SERVED_NAME="${SERVED_NAME:-$planned_model}"
BIND_ADDRESS="${BIND_ADDRESS:-0.0.0.0}"
PORT="${PORT:-8000}"
read -r -a extra <<<"${EXTRA_ARGS:-}"
REPLICAS="${REPLICAS:-1}"

start_replica() { # replica index on this machine, port
    local replica="$1" port="$2"
    local -a args=(
        --served-model-name "$SERVED_NAME"
        --host "$BIND_ADDRESS"
        --port "$port"
        --tensor-parallel-size 2
        --pipeline-parallel-size 1
        --max-model-len 4096
        --max-num-seqs 64
        --max-num-batched-tokens 8192
        --kv-cache-dtype auto
        --dtype float16
        --gpu-memory-utilization 0.9
    )
    echo "replica $replica on port $port" >&2
    exec vllm serve "$MODEL" "${args[@]}" "${extra[@]}"
}

start_replica 0 "$PORT"

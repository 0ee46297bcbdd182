#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Serves Qwen/Qwen3-32B with vLLM 0.33.0 in fp8:
# tensor parallel 2, pipeline 1, replicas 1,
# 1 machine(s) of 2x rtx-4090.
# Environment: MODEL (hub id or folder), SERVED_NAME, BIND_ADDRESS, PORT, REPLICAS (here), EXTRA_ARGS.
set -euo pipefail

planned_model=Qwen/Qwen3-32B
MODEL="${MODEL:-$planned_model}"
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
        --max-num-seqs 32
        --max-num-batched-tokens 8192
        --kv-cache-dtype fp8
        --dtype bfloat16
        --quantization fp8_per_tensor
        --gpu-memory-utilization 0.92
    )
    echo "replica $replica on port $port" >&2
    exec vllm serve "$MODEL" "${args[@]}" "${extra[@]}"
}

start_replica 0 "$PORT"

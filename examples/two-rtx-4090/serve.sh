#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Serves Qwen/Qwen3-32B with TensorRT-LLM 1.2.1 in int4-awq:
# tensor parallel 2, pipeline 1, replicas 1,
# 1 machine(s) of 2x rtx-4090.
# MODEL must be an AWQ 4-bit checkpoint; the engine does not convert plain weights.
# Environment: MODEL (hub id or folder), SERVED_NAME, BIND_ADDRESS, PORT, REPLICAS (here), EXTRA_ARGS.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

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
        "$MODEL"
        --backend pytorch
        --host "$BIND_ADDRESS"
        --port "$port"
        --tp_size 2
        --pp_size 1
        --max_batch_size 4
        --max_num_tokens 8192
        --max_seq_len 4096
        --kv_cache_free_gpu_memory_fraction 0.9
        --extra_llm_api_options "$here/trtllm_options.yaml"
    )
    echo "replica $replica on port $port" >&2
    exec trtllm-serve "${args[@]}" "${extra[@]}"
}

start_replica 0 "$PORT"

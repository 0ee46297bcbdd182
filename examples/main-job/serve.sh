#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Serves nvidia/Llama-3.3-70B-Instruct-FP8 with TensorRT-LLM 1.2.1 in fp8:
# tensor parallel 1, pipeline 1, replicas 1,
# 1 machine(s) of 1x b200.
# Environment: MODEL (hub id or folder), SERVED_NAME, BIND_ADDRESS, PORT, REPLICAS (here), EXTRA_ARGS.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

planned_model=nvidia/Llama-3.3-70B-Instruct-FP8
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
        --tp_size 1
        --pp_size 1
        --max_batch_size 384
        --max_num_tokens 8192
        --max_seq_len 4096
        --kv_cache_free_gpu_memory_fraction 0.9
        --extra_llm_api_options "$here/trtllm_options.yaml"
    )
    echo "replica $replica on port $port" >&2
    exec trtllm-serve "${args[@]}" "${extra[@]}"
}

start_replica 0 "$PORT"

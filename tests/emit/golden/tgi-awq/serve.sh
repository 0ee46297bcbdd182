#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Serves meta-llama/Llama-3.1-70B-Instruct with Text Generation Inference 3.3.7 in int4-awq:
# tensor parallel 4, pipeline 1, replicas 1,
# 1 machine(s) of 8x a100-sxm-40.
# MODEL must be an AWQ 4-bit checkpoint; the engine does not convert plain weights.
# The hub may ask for an accepted licence for this model: export HF_TOKEN of an account that has it.
# Environment: MODEL (hub id or folder), SERVED_NAME, BIND_ADDRESS, PORT, REPLICAS (here), EXTRA_ARGS.
set -euo pipefail

planned_model=meta-llama/Llama-3.1-70B-Instruct
MODEL="${MODEL:?set it to an AWQ 4-bit checkpoint (hub id or folder)}"
SERVED_NAME="${SERVED_NAME:-$planned_model}"
BIND_ADDRESS="${BIND_ADDRESS:-0.0.0.0}"
PORT="${PORT:-3000}"
read -r -a extra <<<"${EXTRA_ARGS:-}"
REPLICAS="${REPLICAS:-1}"

start_replica() { # replica index on this machine, port
    local replica="$1" port="$2"
    local -a args=(
        --model-id "$MODEL"
        --hostname "$BIND_ADDRESS"
        --port "$port"
        --num-shard 4
        --max-input-tokens 4095
        --max-total-tokens 4096
        --max-batch-prefill-tokens 8192
        --max-batch-size 64
        --master-port "$((${MASTER_PORT:-29500} + replica))"
        --shard-uds-path "/tmp/text-generation-server-$port"
        --quantize awq
        --cuda-memory-fraction 0.9
    )
    echo "replica $replica on port $port" >&2
    exec text-generation-launcher "${args[@]}" "${extra[@]}"
}

start_replica 0 "$PORT"

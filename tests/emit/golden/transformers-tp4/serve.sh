#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Serves meta-llama/Llama-3.1-8B-Instruct with Transformers 5.24.0 in fp16:
# tensor parallel 4, pipeline 1, replicas 1,
# 1 machine(s) of 4x t4.
# The hub may ask for an accepted licence for this model: export HF_TOKEN of an account that has it.
# Environment: MODEL (hub id or folder), SERVED_NAME, BIND_ADDRESS, PORT, REPLICAS (here), EXTRA_ARGS.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

planned_model=meta-llama/Llama-3.1-8B-Instruct
MODEL="${MODEL:-$planned_model}"
SERVED_NAME="${SERVED_NAME:-$planned_model}"
BIND_ADDRESS="${BIND_ADDRESS:-0.0.0.0}"
PORT="${PORT:-8000}"
read -r -a extra <<<"${EXTRA_ARGS:-}"
REPLICAS="${REPLICAS:-1}"

if [[ "${INSTALL:-0}" == 1 ]]; then python3 -m pip install --quiet 'transformers[serving]==5.24.0' accelerate==1.15.0; fi

start_replica() { # replica index on this machine, port
    local replica="$1" port="$2"
    local -a args=(
        --nproc-per-node 4
        --master-addr 127.0.0.1
        --master-port "$((${MASTER_PORT:-29500} + replica))"
        "$here/serve_transformers.py"
    )
    export MODEL SERVED_NAME BIND_ADDRESS REPLICA_PORT="$port"
    echo "replica $replica on port $port" >&2
    exec torchrun "${args[@]}" "${extra[@]}"
}

start_replica 0 "$PORT"

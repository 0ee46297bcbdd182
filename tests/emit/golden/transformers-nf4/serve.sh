#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Serves Qwen/Qwen2.5-32B-Instruct with Transformers 5.24.0 in bnb-nf4:
# tensor parallel 1, pipeline 1, replicas 2,
# 1 machine(s) of 2x rtx-4090.
# Environment: MODEL (hub id or folder), SERVED_NAME, BIND_ADDRESS, PORT, REPLICAS (here), EXTRA_ARGS.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

planned_model=Qwen/Qwen2.5-32B-Instruct
MODEL="${MODEL:-$planned_model}"
SERVED_NAME="${SERVED_NAME:-$planned_model}"
BIND_ADDRESS="${BIND_ADDRESS:-0.0.0.0}"
PORT="${PORT:-8000}"
read -r -a extra <<<"${EXTRA_ARGS:-}"
REPLICAS="${REPLICAS:-2}"

if [[ "${INSTALL:-0}" == 1 ]]; then python3 -m pip install --quiet 'transformers[serving]==5.24.0' accelerate==1.15.0 bitsandbytes==0.50.2; fi

start_replica() { # replica index on this machine, port
    local replica="$1" port="$2"
    local -a args=(
        "$here/serve_transformers.py"
    )
    export MODEL SERVED_NAME BIND_ADDRESS REPLICA_PORT="$port"
    echo "replica $replica on port $port" >&2
    exec python3 "${args[@]}" "${extra[@]}"
}

if ((REPLICAS == 1)); then
    start_replica 0 "$PORT"
fi

# One process a replica, each with its own GPUs and its own port: PORT, PORT + 1, ...
pids=()
stop() {
    trap - INT TERM EXIT
    kill "${pids[@]}" 2>/dev/null || true
    wait "${pids[@]}" 2>/dev/null || true
}
trap 'stop; exit 143' INT TERM
trap stop EXIT
for ((replica = 0; replica < REPLICAS; replica++)); do
    first=$((replica * 1))
    gpus=$(seq -s, "$first" "$((first + 1 - 1))")
    (
        trap - INT TERM EXIT
        export CUDA_VISIBLE_DEVICES="$gpus"
        start_replica "$replica" "$((PORT + replica))"
    ) &
    pids+=("$!")
done
wait -n # one replica ending ends all: a supervisor then restarts the whole

#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Serves meta-llama/Llama-3.1-70B-Instruct with TensorRT-LLM 1.2.1 in fp8:
# tensor parallel 4, pipeline 1, replicas 2,
# 1 machine(s) of 8x h100-sxm.
# MODEL must be an FP8 checkpoint (ModelOpt); the engine does not convert plain weights.
# The hub may ask for an accepted licence for this model: export HF_TOKEN of an account that has it.
# Environment: MODEL (hub id or folder), SERVED_NAME, BIND_ADDRESS, PORT, REPLICAS (here), EXTRA_ARGS.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

planned_model=meta-llama/Llama-3.1-70B-Instruct
MODEL="${MODEL:?set it to an FP8 checkpoint (ModelOpt) (hub id or folder)}"
SERVED_NAME="${SERVED_NAME:-$planned_model}"
BIND_ADDRESS="${BIND_ADDRESS:-0.0.0.0}"
PORT="${PORT:-8000}"
read -r -a extra <<<"${EXTRA_ARGS:-}"
REPLICAS="${REPLICAS:-2}"

start_replica() { # replica index on this machine, port
    local replica="$1" port="$2"
    local -a args=(
        "$MODEL"
        --backend pytorch
        --host "$BIND_ADDRESS"
        --port "$port"
        --tp_size 4
        --pp_size 1
        --max_batch_size 64
        --max_num_tokens 8192
        --max_seq_len 4096
        --kv_cache_free_gpu_memory_fraction 0.9
        --extra_llm_api_options "$here/trtllm_options.yaml"
    )
    echo "replica $replica on port $port" >&2
    exec trtllm-serve "${args[@]}" "${extra[@]}"
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
    first=$((replica * 4))
    gpus=$(seq -s, "$first" "$((first + 4 - 1))")
    (
        trap - INT TERM EXIT
        export CUDA_VISIBLE_DEVICES="$gpus"
        start_replica "$replica" "$((PORT + replica))"
    ) &
    pids+=("$!")
done
wait -n # one replica ending ends all: a supervisor then restarts the whole

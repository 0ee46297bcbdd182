#!/usr/bin/env bash
# Written by `planner emit`; edits are lost when it runs again.
# Serves meta-llama/Llama-3.1-405B-Instruct with vLLM 0.33.0 in bf16:
# tensor parallel 8, pipeline 2, replicas 1,
# 2 machine(s) of 8x a100-sxm-80.
# The hub may ask for an accepted licence for this model: export HF_TOKEN of an account that has it.
# Environment: MODEL (hub id or folder), SERVED_NAME, BIND_ADDRESS, PORT, REPLICAS (here), EXTRA_ARGS.
# A replica spans machines. Run this on each with MACHINE_INDEX (0, 1, ...) and HOSTS (all addresses, in
# that order), or with NODE_RANK (within the replica) and MASTER_ADDR (address of its rank 0).
set -euo pipefail

planned_model=meta-llama/Llama-3.1-405B-Instruct
MODEL="${MODEL:-$planned_model}"
SERVED_NAME="${SERVED_NAME:-$planned_model}"
BIND_ADDRESS="${BIND_ADDRESS:-0.0.0.0}"
PORT="${PORT:-8000}"
read -r -a extra <<<"${EXTRA_ARGS:-}"
MACHINE_INDEX="${MACHINE_INDEX:-${SLURM_NODEID:-0}}"
NODE_RANK="${NODE_RANK:-$((MACHINE_INDEX % 2))}"
MASTER_ADDR="${MASTER_ADDR:-}"
MASTER_PORT="${MASTER_PORT:-29501}"
if [[ -z "$MASTER_ADDR" && -n "${HOSTS:-}" ]]; then
    read -r -a hosts <<<"${HOSTS//$'\n'/ }"
    MASTER_ADDR="${hosts[MACHINE_INDEX - NODE_RANK]}"
fi
if [[ -z "$MASTER_ADDR" ]]; then
    echo "set MASTER_ADDR to the address of this replica's first machine, or HOSTS to all addresses" >&2
    exit 2
fi

start_replica() { # replica index on this machine, port
    local replica="$1" port="$2"
    local -a args=(
        --served-model-name "$SERVED_NAME"
        --host "$BIND_ADDRESS"
        --port "$port"
        --tensor-parallel-size 8
        --pipeline-parallel-size 2
        --max-model-len 4096
        --max-num-seqs 12
        --max-num-batched-tokens 8192
        --kv-cache-dtype auto
        --dtype bfloat16
        --gpu-memory-utilization 0.92
    )
    args+=(--nnodes 2 --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
    if [[ "$NODE_RANK" != 0 ]]; then args+=(--headless); fi
    echo "replica $replica on port $port" >&2
    exec vllm serve "$MODEL" "${args[@]}" "${extra[@]}"
}

start_replica 0 "$PORT"

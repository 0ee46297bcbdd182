"""vLLM: `vllm serve`. Flags of vllm 0.33.0; multi-node through --nnodes (no Ray)."""

from __future__ import annotations

from planner.emit.layout import Layout
from planner.emit.script import HOST, MODEL, PORT, SERVED, Command, serve_sh
from planner.emit.text import Shell, Word
from planner.errors import InvalidValueError


def files(layout: Layout) -> dict[str, str]:
    """serve.sh. Attention data parallel becomes --data-parallel-size with expert parallel inside one replica."""
    dep, serve = layout.deployment, layout.serve
    groups = serve.attention_data_parallel
    rows: list[list[Word]] = [
        ["--served-model-name", SERVED],
        ["--host", HOST],
        ["--port", PORT],
        ["--tensor-parallel-size", dep.tensor_parallel // groups],
        ["--pipeline-parallel-size", dep.pipeline_parallel],
        ["--max-model-len", serve.max_model_len],
        ["--max-num-seqs", -(-serve.max_num_seqs // groups)],
        ["--max-num-batched-tokens", serve.max_num_batched_tokens],
        ["--kv-cache-dtype", layout.kv_flag],
    ]
    if not (layout.load_flag or "").startswith("--dtype"):
        rows.append(["--dtype", layout.dtype])
    if layout.load_flag:
        rows.append(list(layout.load_flag.split()))
    if serve.gpu_memory_utilization is not None:
        rows.append(["--gpu-memory-utilization", serve.gpu_memory_utilization])
    if dep.context_parallel > 1:
        rows.append(["--prefill-context-parallel-size", dep.context_parallel])
    if dep.expert_parallel > 1 or groups > 1:
        rows.append(["--enable-expert-parallel"])
    if groups > 1:
        rows.append(["--data-parallel-size", groups])
    native = layout.replicas_per_machine > 1 and not layout.plan.model.moe and groups == 1
    if (
        native
    ):  # replicas of a dense model are independent; of a mixture of experts, vLLM would shard the experts over them
        rows.append(["--data-parallel-size", Shell('"$REPLICAS"')])
    program = ["vllm", "serve", MODEL]
    return {"serve.sh": serve_sh(layout, Command(program, rows, _nodes(layout, groups), native))}


def _nodes(layout: Layout, groups: int) -> str:
    """Shell that adds the node arguments of a replica over several machines."""
    nodes = layout.nodes_per_replica
    if nodes == 1:
        return ""
    if groups == 1:
        head = '--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"'
        first, worker = f'--nnodes {nodes} --node-rank "$NODE_RANK" {head}', "--headless"
    elif groups % nodes or layout.deployment.pipeline_parallel > 1:
        raise InvalidValueError(
            f"vLLM cannot lay {groups} attention groups over {nodes} machines",
            "whole groups go to a machine",
            "Pin --tp or --pp.",
        )
    else:
        local = groups // nodes
        head = '--data-parallel-address "$MASTER_ADDR" --data-parallel-rpc-port "$MASTER_PORT"'
        first = f"--data-parallel-size-local {local} {head}"
        worker = f'--headless --data-parallel-start-rank "$((NODE_RANK * {local}))"'
    return f'args+=({first})\nif [[ "$NODE_RANK" != 0 ]]; then args+=({worker}); fi'

"""SGLang: `python3 -m sglang.launch_server`. Flags of sglang 0.5.23."""

from __future__ import annotations

from planner.emit.layout import Layout
from planner.emit.script import HOST, MODEL, PORT, SERVED, Command, serve_sh
from planner.emit.text import Shell, Word


def files(layout: Layout) -> dict[str, str]:
    """serve.sh. Replicas of a machine run behind SGLang's own data-parallel controller, on one port."""
    dep, serve = layout.deployment, layout.serve
    groups = serve.attention_data_parallel
    rows: list[list[Word]] = [
        ["--model-path", MODEL],
        ["--served-model-name", SERVED],
        ["--host", HOST],
        ["--port", PORT],
        ["--tp-size", dep.tensor_parallel],
        ["--pp-size", dep.pipeline_parallel],
        ["--context-length", serve.max_model_len],
        ["--max-running-requests", serve.max_num_seqs],
        ["--chunked-prefill-size", serve.max_num_batched_tokens * groups],  # divided among the groups by the server
        ["--kv-cache-dtype", layout.kv_flag],
        ["--enable-metrics"],
    ]
    if not (layout.load_flag or "").startswith("--dtype"):
        rows.append(["--dtype", layout.dtype])
    if layout.load_flag:
        rows.append(list(layout.load_flag.split()))
    if serve.gpu_memory_utilization is not None:
        rows.append(["--mem-fraction-static", serve.gpu_memory_utilization])
    if dep.expert_parallel > 1:
        rows.append(["--ep-size", dep.expert_parallel])
    native = layout.replicas_per_machine > 1 and groups == 1
    if groups > 1:
        rows.append(["--dp-size", groups])
        rows.append(["--enable-dp-attention"])
    elif native:
        rows.append(["--dp-size", Shell('"$REPLICAS"')])
    more = ""
    if layout.nodes_per_replica > 1:
        head = '--dist-init-addr "$MASTER_ADDR:$MASTER_PORT"'
        more = f'args+=(--nnodes {layout.nodes_per_replica} --node-rank "$NODE_RANK" {head})'
    program = ["python3", "-m", "sglang.launch_server"]
    return {"serve.sh": serve_sh(layout, Command(program, rows, more, native))}

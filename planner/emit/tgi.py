"""Text Generation Inference: `text-generation-launcher`, inside its container. Flags of its launcher reference."""

from __future__ import annotations

from planner.emit.layout import Layout
from planner.emit.script import HOST, MODEL, PORT, Command, rendezvous_port, serve_sh
from planner.emit.text import Shell, Word


def files(layout: Layout) -> dict[str, str]:
    """serve.sh. TGI shards over the GPUs of one machine and cannot pipeline."""
    dep, serve = layout.deployment, layout.serve
    rows: list[list[Word]] = [
        ["--model-id", MODEL],
        ["--hostname", HOST],
        ["--port", PORT],
        ["--num-shard", dep.tensor_parallel],
        ["--max-input-tokens", max(1, serve.max_model_len - 1)],
        ["--max-total-tokens", serve.max_model_len],
        ["--max-batch-prefill-tokens", serve.max_num_batched_tokens],
        ["--max-batch-size", serve.max_num_seqs],
        ["--master-port", rendezvous_port()],
        ["--shard-uds-path", Shell('"/tmp/text-generation-server-$port"')],
    ]
    if layout.load_flag:
        rows.append(list(layout.load_flag.split()))
    if layout.kv_flag != "auto":
        rows.append(["--kv-cache-dtype", layout.kv_flag])
    if serve.gpu_memory_utilization is not None:
        rows.append(["--cuda-memory-fraction", serve.gpu_memory_utilization])
    return {"serve.sh": serve_sh(layout, Command(["text-generation-launcher"], rows))}

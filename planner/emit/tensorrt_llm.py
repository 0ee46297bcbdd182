"""TensorRT-LLM: `trtllm-serve`, PyTorch backend, with an options file. Options of tensorrt_llm/commands/serve.py."""

from __future__ import annotations

from typing import Any

from planner.emit.layout import Layout
from planner.emit.script import HOST, MODEL, PORT, Command, beside, serve_sh
from planner.emit.text import Word, to_yaml

OPTIONS = "trtllm_options.yaml"


def files(layout: Layout) -> dict[str, str]:
    """serve.sh and the options file. A replica over several machines is one MPI job: srun starts a rank a GPU."""
    dep, serve = layout.deployment, layout.serve
    share = 0.9 if serve.gpu_memory_utilization is None else serve.gpu_memory_utilization
    rows: list[list[Word]] = [
        [MODEL],
        ["--backend", "pytorch"],
        ["--host", HOST],
        ["--port", PORT],
        ["--tp_size", dep.tensor_parallel],
        ["--pp_size", dep.pipeline_parallel],
        ["--max_batch_size", serve.max_num_seqs],
        ["--max_num_tokens", serve.max_num_batched_tokens],
        ["--max_seq_len", serve.max_model_len],
        ["--kv_cache_free_gpu_memory_fraction", share],
        ["--extra_llm_api_options", beside(OPTIONS)],
    ]
    if dep.expert_parallel > 1:
        rows.append(["--ep_size", dep.expert_parallel])
    several = layout.nodes_per_replica > 1
    if several:
        rows.append(["--gpus_per_node", layout.gpus_per_node])
    program: list[Word] = ["trtllm-serve"] if not several else ["trtllm-llmapi-launch", "trtllm-serve"]
    settings: dict[str, Any] = {
        "dtype": layout.dtype,
        "enable_chunked_prefill": True,
        "kv_cache_config": {"dtype": layout.kv_flag, "free_gpu_memory_fraction": share},
    }
    if serve.attention_data_parallel > 1:
        settings["enable_attention_dp"] = True
    return {"serve.sh": serve_sh(layout, Command(program, rows)), OPTIONS: to_yaml(settings)}

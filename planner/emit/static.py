"""The two engines without a server of their own: DeepSpeed inference and plain transformers, batch by batch.

Both scripts are a loader (templates/<engine>.py.txt) followed by the same server (templates/static_server.py.txt).
"""

from __future__ import annotations

import pprint
from importlib.resources import files as resources
from typing import Any

from planner.emit.layout import Layout
from planner.emit.script import HOST, MODEL, PORT, Command, beside, rendezvous_port, serve_sh
from planner.emit.text import HEADER, Word, comment

QUANTIZATION: dict[str, dict[str, Any]] = {
    "bnb-int8": {"config": "BitsAndBytesConfig", "settings": {"load_in_8bit": True}},
    "bnb-nf4": {
        "config": "BitsAndBytesConfig",
        "settings": {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
        },
    },
    "fp8-block": {"config": "FineGrainedFP8Config", "settings": {"weight_block_size": [128, 128]}},
    "nvfp4": {"config": "NVFP4Config", "settings": {}},
}
CHECKPOINT = {"int4-awq": "awq", "int4-gptq": "gptq", "mxfp4": "mxfp4"}
DEEPSPEED_SCRIPT, TRANSFORMERS_SCRIPT = "serve_deepspeed.py", "serve_transformers.py"


def _script(layout: Layout, template: str, settings: dict[str, Any]) -> str:
    about = comment(
        [HEADER, "Settings of the plan are in PLAN; MODEL, SERVED_NAME, BIND_ADDRESS and PORT override it."]
    )
    folder = resources("planner.emit").joinpath("templates")
    head = folder.joinpath(template).read_text("utf-8").replace("@@ABOUT@@", about)
    head = head.replace("@@SETTINGS@@", "PLAN = " + pprint.pformat(settings, width=110, sort_dicts=False))
    return head + folder.joinpath("static_server.py.txt").read_text("utf-8")


def _settings(layout: Layout) -> dict[str, Any]:
    serve = layout.serve
    return {
        "model": layout.model,
        "precision": layout.deployment.precision,
        "dtype": layout.dtype,
        "port": layout.port,
        "max_batch": serve.max_num_seqs,
        "max_model_len": serve.max_model_len,
    }


def _torchrun(processes: int) -> list[list[Word]]:
    port = rendezvous_port()
    return [["--nproc-per-node", processes], ["--master-addr", "127.0.0.1"], ["--master-port", port]]


def deepspeed_files(layout: Layout) -> dict[str, str]:
    """serve.sh and serve_deepspeed.py: init_inference with AutoTP over the GPUs of one machine."""
    layout.kv_flag  # noqa: B018 (raises when the plan stores the cache in a dtype this engine lacks)
    size = layout.deployment.tensor_parallel
    settings = _settings(layout) | {
        "inference": {"tensor_parallel": {"tp_size": size}, "replace_with_kernel_inject": False}
    }
    rows: list[list[Word]] = [*_torchrun(size), [beside(DEEPSPEED_SCRIPT)]]
    # torchrun: the deepspeed launcher leaves its workers behind on SIGTERM. init_inference then wants LOCAL_SIZE
    more = f'export MODEL SERVED_NAME BIND_ADDRESS REPLICA_PORT="$port" LOCAL_SIZE={size}'
    return {
        "serve.sh": serve_sh(layout, Command(["torchrun"], rows, more, installs=True)),
        DEEPSPEED_SCRIPT: _script(layout, "deepspeed.py.txt", settings),
    }


def transformers_files(layout: Layout) -> dict[str, str]:
    """serve.sh with `transformers serve` where one request at a time is planned, else with serve_transformers.py."""
    layout.kv_flag  # noqa: B018 (raises when the plan stores the cache in a dtype this engine lacks)
    dep = layout.deployment
    if (quick := _transformers_serve(layout)) is not None:
        return {"serve.sh": serve_sh(layout, quick)}
    quantization = QUANTIZATION.get(dep.precision)
    if quantization and "bnb_4bit_compute_dtype" in quantization["settings"]:
        quantization = quantization | {"settings": quantization["settings"] | {"bnb_4bit_compute_dtype": layout.dtype}}
    settings = _settings(layout) | {
        "tensor_parallel": dep.tensor_parallel,
        "quantization": quantization,
        "checkpoint": CHECKPOINT.get(dep.precision),
    }
    rows: list[list[Word]] = [[beside(TRANSFORMERS_SCRIPT)]]
    program: list[Word] = ["python3"]
    if dep.tensor_parallel > 1:
        program, rows = ["torchrun"], [*_torchrun(dep.tensor_parallel), *rows]
    more = 'export MODEL SERVED_NAME BIND_ADDRESS REPLICA_PORT="$port"'
    return {
        "serve.sh": serve_sh(layout, Command(program, rows, more, installs=True)),
        TRANSFORMERS_SCRIPT: _script(layout, "transformers.py.txt", settings),
    }


def _transformers_serve(layout: Layout) -> Command | None:
    """`transformers serve`, when it does all that was planned: one GPU, one request at a time, no other checkpoint."""
    dep = layout.deployment
    flags = {
        "bf16": [],
        "fp16": [],
        "bnb-int8": ["--quantization", "bnb-8bit"],
        "bnb-nf4": ["--quantization", "bnb-4bit"],
    }
    if dep.tensor_parallel > 1 or layout.serve.max_num_seqs > 1 or dep.precision not in flags:
        return None
    rows: list[list[Word]] = [[MODEL], ["--host", HOST], ["--port", PORT], ["--dtype", layout.dtype]]
    if flags[dep.precision]:
        rows.append(list(flags[dep.precision]))
    return Command(["transformers", "serve"], rows, installs=True)

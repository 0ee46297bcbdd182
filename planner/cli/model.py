"""`planner model`: what a model is made of, and which models are known offline."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from planner.cli.once import OnceCommand

app = typer.Typer(no_args_is_help=True, help="Models: what they are made of, and which are known offline.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_SHOWN = ("bf16", "fp8", "int8-w8a8", "int4-awq", "bnb-nf4")


@app.command(cls=OnceCommand)
def show(
    ref: Annotated[str, typer.Argument(help="Alias (70b), hub id (org/name), a config.json or a model folder.")],
    revision: Annotated[str | None, typer.Option(help="Revision on the hub.")] = None,
    token: Annotated[str | None, typer.Option(envvar="HF_TOKEN", help="Access token of the hub.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Never ask the hub.")] = False,
    as_json: AsJson = False,
) -> None:
    """Explain a model: layers by kind, parameters, bytes by precision, cache per token, what limits parallelism.

    Bare sizes: 8b is Llama 3.1, 70b Llama 3.3, 405b Llama 3.1, 14b and 32b Qwen3, 7b and 72b Qwen2.5.
    """
    from planner.models import load_model
    from planner.models.describe import facts
    from planner.report.model import print_json, print_model

    model = load_model(ref, revision=revision, token=token, offline=offline)
    found = {**facts(model), **_memory(model)}
    if as_json:
        print_json(found)
    else:
        print_model(found)


def _memory(model: Any) -> dict[str, Any]:
    """Bytes on one GPU, without any parallelism, as vLLM lays them out."""
    from planner.estimator.memory.kv_cache import (
        kv_bytes_per_token,
        sequence_bytes,
        stages_kv,
        state_bytes_per_sequence,
    )
    from planner.estimator.memory.rules import memory_rules
    from planner.estimator.memory.weights import weights_bytes
    from planner.models.precision import kv_dtype

    names = dict.fromkeys((model.native_precision, *_SHOWN))
    tokens, rules = min(model.max_context, 8192), memory_rules("vllm")
    caches = []
    for dtype in ("bf16", "fp8"):
        cost = stages_kv(model, kv_dtype(dtype), 1, 1, 1, rules)[0]
        per_token = kv_bytes_per_token(model, dtype)
        sequence = float(sequence_bytes(cost, tokens, tokens))
        caches.append(
            {
                "dtype": dtype,
                "engine": "vllm",
                "bytes_per_token": per_token,
                "tokens": tokens,
                "sequence_bytes": sequence,
            }
        )
    weights = [
        {
            "precision": n,
            "bytes": weights_bytes(model, n),
            "bytes_per_param": weights_bytes(model, n) / model.params_total,
        }
        for n in names
    ]
    counted = weights_bytes(model, model.native_precision, engine="deepspeed_inference")
    stored = model.checkpoint_bytes
    difference = (counted / stored - 1) * 100 if stored else None
    return {
        "weights": weights,
        "kv_cache": caches,
        "state_bytes_per_sequence": state_bytes_per_sequence(model),
        "counted_against_files_percent": difference,
    }


@app.command("list", cls=OnceCommand)
def list_models(
    search: Annotated[str, typer.Argument(help="Only models whose id or alias holds this text.")] = "",
    as_json: AsJson = False,
) -> None:
    """Models known offline, with their aliases."""
    from planner.models import load_model
    from planner.models.lookup import records
    from planner.report.model import print_json, print_list

    wanted = search.lower()
    rows = [
        {"id": r["id"], "aliases": r["aliases"], "also": r.get("also", []), "params": load_model(r["id"]).params_total}
        for r in records()
        if wanted in r["id"].lower() or any(wanted in a for a in r["aliases"])
    ]
    if as_json:
        print_json(rows)
    else:
        print_list(rows)

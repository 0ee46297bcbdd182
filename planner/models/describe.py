"""A model in facts and words: what `planner model show` prints. No memory rules of engines here."""

from __future__ import annotations

from typing import Any

from planner.models.flops import decode_flops, prefill_flops
from planner.models.limits import (
    copied_kv_heads,
    degrees,
    expert_parallel_problem,
    pipeline_parallel_problem,
    tensor_parallel_problem,
)
from planner.models.spec import Attention, DenseMlp, LatentAttention, Layer, ModelSpec, MoeMlp, StateMixer

_CONTEXTS = (1024, 8192, 32768)


def _attention_words(m: Attention) -> str:
    kind = (
        "cross attention"
        if m.cross
        else {
            "full": "attention",
            "sliding": f"sliding attention (window {m.window})",
            "chunked": f"chunked attention ({m.window})",
        }[m.kind]
    )
    shape = f"{m.heads} heads, {m.kv_heads} key/value heads of {m.head_dim}"
    extras = [f"values of {m.value_dim}"] if m.value_dim != m.head_dim else []
    extras += ["output gate"] if m.output_gate else []
    extras += ["attention sinks"] if m.sinks else []
    extras += ["cache of an earlier layer"] if m.shared_kv else []
    return ", ".join([f"{kind}: {shape}", *extras])


def _mixer_words(m: Attention | LatentAttention | StateMixer) -> str:
    if isinstance(m, Attention):
        return _attention_words(m)
    if isinstance(m, LatentAttention):
        text = f"latent attention (MLA): {m.heads} heads, {m.kv_lora_rank} + {m.qk_rope_head_dim} cached per token"
        text += f", sparse indexer (top {m.indexer_top_k})" if m.indexer_dim else ""
        text += f", compressed {m.compression} times beyond a window of {m.window}" if m.compression > 1 else ""
        return text + (f", only a window of {m.window} is cached" if m.compression == 0 else "")
    return f"{m.kind.replace('_', ' ')}: state of {m.state_elements + m.conv_elements:,} elements per sequence"


def layer_words(layer: Layer) -> str:
    """One block in words."""
    parts = [_mixer_words(m) for m in layer.mixers]
    mlp = layer.mlp
    if isinstance(mlp, DenseMlp):
        parts.append(f"feed-forward {mlp.intermediate:,}{' (gated)' if mlp.gated else ''}")
    elif isinstance(mlp, MoeMlp):
        shared = f" and {mlp.shared_intermediate:,} shared" if mlp.shared_intermediate else ""
        parts.append(f"{mlp.experts} experts of {mlp.expert_intermediate:,}, {mlp.experts_per_token} per token{shared}")
    return " + ".join(parts) or "empty block"


def tensor_parallel_words(model: ModelSpec) -> list[str]:
    """What limits tensor, pipeline and expert parallel, and what is copied."""
    allowed = degrees(model)
    words = [f"tensor parallel up to 64: {', '.join(map(str, allowed))}"]
    for tp in (2, 3, 4, 6, 8, 16):
        problem = tensor_parallel_problem(model, tp)
        if problem:
            words.append(f"  not {tp}: {problem}")
    for tp in allowed:
        copied = copied_kv_heads(model, tp)
        if copied:
            words.append(f"  at {tp}: {copied}")
            break
    stage = pipeline_parallel_problem(model, 2)
    words.append(
        f"pipeline parallel: {stage}"
        if stage
        else f"pipeline parallel: up to {len(model.layers)} stages (one layer each)"
    )
    experts = [ep for ep in range(2, 129) if expert_parallel_problem(model, ep) is None]
    words.append(
        f"expert parallel: {', '.join(map(str, experts))}"
        if experts
        else f"expert parallel: no, {expert_parallel_problem(model, 2)}"
    )
    return words


def facts(model: ModelSpec) -> dict[str, Any]:
    """Everything that follows from the layer list alone."""
    return {
        "name": model.name,
        "hf_id": model.hf_id,
        "family": model.family,
        "source": model.source,
        "params_total": model.params_total,
        "params_active": model.params_active,
        "params_embedding": model.embedding_params,
        "params_lm_head": model.lm_head_params,
        "tied_embeddings": model.tie_embeddings,
        "layers": len(model.layers),
        "hidden": model.hidden,
        "vocab": model.vocab,
        "max_context": model.max_context,
        "moe": model.is_moe,
        "native_precision": model.native_precision,
        "not_in_that_precision": list(model.unquantised_modules),
        "checkpoint_bytes": model.checkpoint_bytes,
        "gated": model.gated_repo,
        "license": model.license_note,
        "layer_kinds": [
            {"count": n, "params": layer.params(model.hidden), "words": layer_words(layer)}
            for layer, n in model.layer_groups
        ],
        "beside_the_decoder": [{"name": t.name, "params": t.params, "loaded": t.loaded} for t in model.towers],
        "gflops_per_token": {str(c): round(decode_flops(model, c).total / 1e9, 3) for c in _CONTEXTS},
        "prefill_tflops": {str(c): round(prefill_flops(model, c).total / 1e12, 3) for c in _CONTEXTS},
        "parallel": tensor_parallel_words(model),
        "assumptions": list(model.assumptions),
    }

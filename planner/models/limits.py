"""Which parallel degrees a model allows, and why not, in words a person can check.

Rules of tensor parallel as vLLM 0.32 asserts them (model_executor/layers/linear.py, vocab_parallel_embedding.py):
every rank gets whole heads, whole feed-forward columns and an equal part of the vocabulary padded to 64.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.models.precision import Precision
from planner.models.spec import Attention, DenseMlp, LatentAttention, ModelSpec, MoeMlp, StateMixer

VOCAB_MULTIPLE = 64


def padded_vocab(vocab: int) -> int:
    """Vocabulary as engines store it: rounded up to a multiple of 64."""
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _head_problems(model: ModelSpec, tp: int) -> Iterator[str]:
    for layer, _ in model.layer_groups:
        for mixer in layer.mixers:
            if isinstance(mixer, Attention | LatentAttention) and mixer.heads % tp:
                yield f"{mixer.heads} attention heads do not divide over {tp} ranks"
            if isinstance(mixer, Attention) and max(mixer.kv_heads, tp) % min(mixer.kv_heads, tp):
                yield f"{mixer.kv_heads} key/value heads cannot be split or copied evenly over {tp} ranks"
            if isinstance(mixer, StateMixer) and mixer.heads and mixer.heads % tp:
                yield f"{mixer.heads} state heads do not divide over {tp} ranks"


def fewest_kv_heads(model: ModelSpec) -> int | None:
    """Key/value heads of the attention layer that has fewest; None without such layers."""
    mixers = (mixer for layer, _ in model.layer_groups for mixer in layer.mixers)
    return min((mixer.kv_heads for mixer in mixers if isinstance(mixer, Attention)), default=None)


def tensor_parallel_problem(model: ModelSpec, tensor_parallel: int) -> str | None:
    """Why the model cannot be cut over that many tensor-parallel ranks; None when it can.

    Key/value heads fewer than ranks are copied, which is allowed (it costs cache, see kv_cache.py).
    """
    tp = tensor_parallel
    if tp < 1:
        return f"{tp} is not a number of ranks"
    if tp == 1:
        return None
    for problem in _head_problems(model, tp):
        return problem
    if padded_vocab(model.vocab) % tp:
        return (
            f"the vocabulary of {model.vocab} (stored as {padded_vocab(model.vocab)}) does not divide over {tp} ranks"
        )
    for layer, _ in model.layer_groups:
        mlp = layer.mlp
        if isinstance(mlp, DenseMlp) and mlp.intermediate % tp:
            return f"the feed-forward width of {mlp.intermediate} does not divide over {tp} ranks"
        if isinstance(mlp, MoeMlp) and mlp.expert_intermediate % tp and mlp.experts % tp:
            return f"neither expert width {mlp.expert_intermediate} nor {mlp.experts} experts divide over {tp} ranks"
    return None


def pipeline_parallel_problem(model: ModelSpec, pipeline_parallel: int) -> str | None:
    """Why the model cannot be cut into that many stages; None when it can."""
    if pipeline_parallel < 1:
        return f"{pipeline_parallel} is not a number of stages"
    if pipeline_parallel > len(model.layers):
        return f"{len(model.layers)} layers cannot fill {pipeline_parallel} stages"
    if pipeline_parallel > 1 and any(
        isinstance(m, Attention) and m.cross for layer, _ in model.layer_groups for m in layer.mixers
    ):
        return "encoder-decoder models are not cut into stages by the engines here"
    return None


def expert_parallel_problem(model: ModelSpec, expert_parallel: int) -> str | None:
    """Why the experts cannot be dealt out over that many ranks; None when they can."""
    if expert_parallel < 1:
        return f"{expert_parallel} is not a number of ranks"
    if expert_parallel == 1:
        return None
    if not model.is_moe:
        return "the model has no experts"
    for layer, _ in model.layer_groups:
        if isinstance(layer.mlp, MoeMlp) and layer.mlp.experts % expert_parallel:
            return f"{layer.mlp.experts} experts do not divide over {expert_parallel} ranks"
    return None


def copied_kv_heads(model: ModelSpec, tensor_parallel: int) -> str | None:
    """What is held more than once at that degree, in words; None when nothing of the cache is."""
    for layer, _ in model.layer_groups:
        for mixer in layer.mixers:
            if isinstance(mixer, LatentAttention) and tensor_parallel > 1:
                return f"the latent KV cache is the same on all {tensor_parallel} ranks"
            if isinstance(mixer, Attention) and mixer.kv_heads < tensor_parallel:
                copies = tensor_parallel // mixer.kv_heads
                return f"{mixer.kv_heads} key/value heads are copied {copies} times over {tensor_parallel} ranks"
    return None


def degrees(model: ModelSpec, most: int = 64) -> list[int]:
    """Tensor-parallel degrees up to `most` that the model allows."""
    return [tp for tp in range(1, most + 1) if tensor_parallel_problem(model, tp) is None]


def precision_parallel_problem(
    model: ModelSpec, precision: Precision, tensor_parallel: int, expert_parallel: int = 1
) -> str | None:
    """Why a quantised layout cannot be cut that way: each rank needs whole scale blocks or groups of the feed-forward.

    vLLM refuses 128 x 128 fp8 blocks with a width per rank that is no multiple (fp8_utils.py, validate_fp8_block_shape)
    and 4-bit groups cut apart (marlin_utils.py, verify_marlin_supports_shape). Methods without groups, MXFP4 (padded),
    NF4 (blocks over the flattened matrix) and whole experts (expert parallel) have no such limit.
    """
    group = precision.group_size
    if tensor_parallel == 1 or not group or precision.name in ("mxfp4", "bnb-nf4"):
        return None
    for layer, _ in model.layer_groups:
        mlp, skipped = layer.mlp, model.unquantised_modules if precision.name == model.native_precision else ()
        if isinstance(mlp, DenseMlp) and precision.quantises_dense_mlp and "dense_mlp" not in skipped:
            width, ways = mlp.intermediate, tensor_parallel
        elif isinstance(mlp, MoeMlp) and "experts" not in skipped:
            width, ways = mlp.expert_intermediate, max(1, tensor_parallel // expert_parallel)
        else:
            continue
        if width % (ways * group):
            return f"a feed-forward width of {width} over {ways} ranks cuts {precision.name} blocks of {group} apart"
    return None

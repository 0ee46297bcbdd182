"""FLOPs counted by FlopCounterMode on the meta device, in a run of their own: nested with a memory tracker, recomputed
activations stay alive, and on fake CPU tensors attention is not seen. Causal attention is counted as if it were full."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from planner.validate.dry_model import build, build_config, plain_masks, torch_modules
from planner.validate.dry_rank import Stage
from planner.validate.dry_train import backward, fake_group, forward, make_model

POINTS = (1, 2)


def straight(measure: Callable[[int], float], layers: int) -> float:
    """The value at `layers` from the values at one and two: FLOPs are linear in equal layers."""
    low, high = (measure(n) for n in POINTS)
    return low + (high - low) * (layers - POINTS[0])


def _model(raw: dict[str, Any], layers: int, ranks: int) -> Any:
    torch, _ = torch_modules()
    with torch.device("meta"):
        return build(build_config(raw, layers, ranks), torch.bfloat16)


def _grouped(inputs: Any, weight: Any, *_rest: Any, out_shape: Any = None, **_more: Any) -> int:
    """2 x rows x K x N of a grouped product: inputs (rows, K), weight (experts, K, N)."""
    return 2 * int(inputs[0]) * int(inputs[1]) * int(weight[2])


def _grouped_backward(inputs: Any, weight: Any, *_rest: Any, out_shape: Any = None, **_more: Any) -> int:
    """Gradients of inputs and of weights: twice the forward."""
    return 2 * _grouped(inputs, weight)


def _counted(run: Callable[[], Any]) -> float:
    torch, _ = torch_modules()
    import transformers.integrations.moe  # noqa: F401 (registers the operators of grouped experts)
    from torch.utils.flop_counter import FlopCounterMode

    experts = {
        torch.ops.transformers.grouped_mm_fallback: _grouped,
        torch.ops.transformers.grouped_mm_fallback_backward: _grouped_backward,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FlopCounterMode(display=False, custom_mapping=experts) as counter:
            run()
    return float(counter.get_total_flops())


def training_flops(raw: dict[str, Any], stage: Stage) -> float:
    """FLOPs of forward and backward of one micro-batch on a stage's rank, recomputation included."""
    torch, _ = torch_modules()
    rank = replace(stage.rank, in_flight=1)
    every = max(1, rank.interval)
    low = every + stage.layers % every
    points = (low, low + every)

    def measure(layers: int) -> float:
        with torch.device("meta"):
            model = make_model(raw, layers, rank, torch.bfloat16, half_only=True)
            with plain_masks(model), fake_group(max(rank.world, rank.tensor)):
                return _counted(lambda: backward(forward(model, rank, torch.bfloat16)))

    if stage.layers <= points[1]:
        return measure(stage.layers)
    first, second = (measure(n) for n in points)
    return first + (second - first) * (stage.layers - points[0]) / every


def serving_flops(raw: dict[str, Any], layers: int, *, ranks: int, tokens: int) -> tuple[float, float]:
    """(prefill of `tokens` with logits of the last one, one decode step after them) of one sequence on one rank."""
    torch, transformers = torch_modules()

    def runs(count: int) -> tuple[float, float]:
        model = _model(raw, count, ranks).eval()
        cache = transformers.DynamicCache()

        def step(length: int) -> float:
            ids = torch.zeros(1, length, dtype=torch.long, device="meta")
            return _counted(lambda: model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1))

        with plain_masks(model), torch.no_grad():
            return step(tokens), step(1)

    pairs = {n: runs(n) for n in POINTS}
    return straight(lambda n: pairs[n][0], layers), straight(lambda n: pairs[n][1], layers)

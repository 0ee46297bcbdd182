"""FLOPs counted by FlopCounterMode on the meta device, in a run of their own: nested with a memory tracker, recomputed
activations stay alive, and on fake CPU tensors attention is not seen. Causal attention is counted as if it were full."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from planner.validate.dry_model import build, build_config, plain_masks, recompute, torch_modules

POINTS = (1, 2)


def straight(measure: Callable[[int], float], layers: int) -> float:
    """The value at `layers` from the values at one and two: FLOPs are linear in equal layers."""
    low, high = (measure(n) for n in POINTS)
    return low + (high - low) * (layers - POINTS[0])


def _model(raw: dict[str, Any], layers: int, ranks: int) -> Any:
    torch, _ = torch_modules()
    with torch.device("meta"):
        return build(build_config(raw, layers, ranks), torch.bfloat16)


def _counted(run: Callable[[], Any]) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FlopCounterMode(display=False) as counter:
            run()
    return float(counter.get_total_flops())


def training_flops(raw: dict[str, Any], layers: int, *, batch: int, tokens: int, checkpointing: bool) -> float:
    """FLOPs of forward and backward of one micro-batch, recomputation included."""
    torch, _ = torch_modules()

    def measure(count: int) -> float:
        model = _model(raw, count, 1)
        model.train()
        if checkpointing:
            recompute(model)
        ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")

        def step() -> None:
            model(input_ids=ids, labels=ids).loss.backward()

        with plain_masks(model):
            return _counted(step)

    return straight(measure, layers)


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

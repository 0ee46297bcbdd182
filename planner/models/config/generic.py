"""A model type without traits: when transformers is installed, its own modules are counted on the meta device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.models.spec import Layer, ModelSpec

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
MOST_LAYERS = 500
MOST_EXPERTS = 65_536


@dataclass(frozen=True)
class Counted:
    """Parameters as transformers builds them: of each decoder layer, and all."""

    by_layer: tuple[int, ...]
    total: int
    version: str


def count_modules(raw: Mapping[str, Any], layers: int) -> Counted | None:
    """Parameters of the real modules, built without memory; None when transformers is absent or does not know the type.

    No code of the repository is run (no trust_remote_code).
    """
    if layers > MOST_LAYERS or any(_too_many(k, v) for k, v in raw.items()):
        return None
    try:
        import torch
        import transformers
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        return None
    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        return None
    fields = {
        k: v for k, v in raw.items() if k not in ("model_type", "quantization_config", "auto_map", "architectures")
    }
    try:
        config = CONFIG_MAPPING[kind](**fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # whatever a foreign constructor raises: the caller then states its assumption
        return None
    return _counted(model, layers, transformers.__version__)


def _too_many(name: str, value: object) -> bool:
    """Counts of experts or layers that could build modules for minutes."""
    counted = ("expert" in name and "size" not in name and "dim" not in name) or ("num" in name and "layer" in name)
    return counted and isinstance(value, int | float) and value > MOST_EXPERTS


def _counted(model: Any, layers: int, version: str) -> Counted:
    by, total = [0] * layers, 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        found = _LAYER.search(name)
        if found and int(found[1]) < layers:
            by[int(found[1])] += parameter.numel()
    return Counted(tuple(by), total, version)


def corrected(spec: ModelSpec, counted: Counted) -> ModelSpec:
    """The spec with layers and whole model as counted; what differs stands as norm parameters."""
    made: dict[tuple[int, int], Layer] = {}
    layers = []
    for layer, real in zip(spec.layers, counted.by_layer, strict=True):
        key = (id(layer), real)
        if key not in made:
            made[key] = (
                replace(layer, norm_params=layer.norm_params + real - layer.params(spec.hidden)) if real else layer
            )
        layers.append(made[key])
    better = replace(spec, layers=tuple(layers))
    rest = counted.total - (better.params_total - sum(t.params for t in better.towers if t.loaded))
    return replace(better, embedding_extra_params=better.embedding_extra_params + rest)

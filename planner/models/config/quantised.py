"""quantization_config and hf_quant_config.json: which precision the checkpoint is in, and which modules stay 16 bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.models.config.fields import Fields


def quantisation_of(f: Fields, top: Fields, extra: Mapping[str, Any] | None) -> tuple[str, tuple[str, ...], list[str]]:
    """(native precision, module classes left at 16 bit, assumptions)."""
    dtype = f.get("torch_dtype", "dtype") or top.get("torch_dtype", "dtype")
    plain = {"float16": "fp16", "float32": "fp32", "bfloat16": "bf16"}.get(dtype if isinstance(dtype, str) else "", "bf16")
    if not f.has("quantization_config") and not top.has("quantization_config") and not extra:
        return plain, (), []
    return plain, (), []

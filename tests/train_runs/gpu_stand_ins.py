"""Stand-ins for packages that only install beside a GPU, so that Megatron Bridge's configuration classes can be imported.

Classes are empty, functions do nothing. Nothing of what is configured comes from them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, ClassVar
from unittest.mock import MagicMock

GPU_ONLY = (
    "transformer_engine", "transformer_engine_torch", "triton", "flash_attn", "mamba_ssm", "causal_conv1d", "fla", "nvidia_resiliency_ext",
    "nemo_run", "timm", "open_clip", "qwen_vl_utils", "mlflow", "modelopt", "datasets", "megatron.energon",
)  # fmt: skip


class _StandIn(types.ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "2.10.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        members = {"__class_getitem__": classmethod(lambda c, _: c), "__init__": lambda self, *a, **k: None}
        value = type(name, (object,), members) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        absent = any(name == p or name.startswith(f"{p}.") for p in GPU_ONLY)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """From now on packages that are not installed and only exist beside GPUs import as stand-ins."""
    sys.meta_path.append(_Finder())

"""Who runs a model: one EngineSpec per engine, read from data. Which axes, precisions and GPUs it supports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from planner.errors import UnknownNameError
from planner.hardware.records import Gpu


@dataclass(frozen=True)
class PrecisionSupport:
    """A precision an engine can run: from which compute capability (None = not on that vendor), and with which flags.

    max_compute_capability: newest NVIDIA GPU with kernels for it (None = no end). max_tensor_parallel: limit of this
    method inside the engine (None = the engine's own). amd_dtype: key of Gpu.peak_tflops an AMD GPU must have for it.
    cpu: runs on CPU devices. experts: mixtures of experts run in it.
    """

    precision: str
    min_compute_capability: float | None
    amd: bool
    flag: str | None
    needs_checkpoint: bool
    note: str = ""
    max_compute_capability: float | None = None
    max_tensor_parallel: int | None = None
    amd_dtype: str | None = None
    cpu: bool = False
    experts: bool = True

    def runs_on(self, gpu: Gpu) -> bool:
        """True when the engine has kernels for this precision on this GPU."""
        if gpu.vendor == "amd":
            return self.amd and (self.amd_dtype is None or self.amd_dtype in gpu.peak_tflops)
        if gpu.vendor == "cpu":
            return self.cpu
        if gpu.vendor != "nvidia" or self.min_compute_capability is None:
            return False
        newest = self.max_compute_capability or float("inf")
        return self.min_compute_capability <= (gpu.compute_capability or 0) <= newest


@dataclass(frozen=True)
class EngineSpec:
    """An inference engine at a version.

    batching: 'continuous' (iteration-level scheduling with chunked prefill), or 'static' (a batch runs to its end).
    online_load: a precision that the engine makes itself is made layer by layer while loading, or after the whole 16-bit
    model is on the GPU (which must then fit). device: 'cpu' = the same engine on CPU devices, with constants of its own.
    tensor_within_kv_heads: attention is cut by key/value heads, which it does not copy: no more ranks than those.
    whole_prompts: the tokens of a step must hold the longest prompt; the engine may refuse to start with fewer.
    multi_node: which axes may cross nodes ('none', 'pipeline', 'any'). memory / time: constants with sources, see
    data files memory.yaml and time.yaml (read by the estimators).
    """

    name: str
    version: str
    vendors: tuple[str, ...]
    min_compute_capability: float
    batching: Literal["continuous", "static"]
    tensor_parallel: bool
    pipeline_parallel: bool
    expert_parallel: bool
    data_parallel_attention: bool
    multi_node: Literal["none", "pipeline", "any"]
    max_batch_note: str
    precisions: tuple[PrecisionSupport, ...]
    kv_dtypes: dict[str, float]
    source: str
    verified: bool
    online_load: Literal["layer", "whole"] = "whole"
    device: Literal["gpu", "cpu"] = "gpu"
    tensor_within_kv_heads: bool = False
    whole_prompts: bool = False

    @property
    def constants(self) -> str:
        """Key of its constants in memory.yaml and time.yaml."""
        return self.name if self.device == "gpu" else f"{self.name}_{self.device}"

    def supports_gpu(self, gpu: Gpu) -> bool:
        """True when the engine has kernels for this GPU."""
        if gpu.vendor not in self.vendors:
            return False
        return gpu.vendor != "nvidia" or (gpu.compute_capability or 0) >= self.min_compute_capability

    def support(self, precision: str, gpu: Gpu) -> PrecisionSupport | None:
        """How this engine runs the precision on this GPU; None when it cannot."""
        row = next((r for r in self.precisions if r.precision == precision), None)
        return row if row is not None and self.supports_gpu(gpu) and row.runs_on(gpu) else None

    def supports_kv(self, dtype: str, gpu: Gpu) -> bool:
        """True when the engine stores its KV cache in dtype on this GPU."""
        if dtype not in self.kv_dtypes:
            return False
        if gpu.vendor == "amd":
            return not dtype.startswith("fp8") or "fp8" in gpu.peak_tflops
        return gpu.vendor != "nvidia" or (gpu.compute_capability or 0) >= self.kv_dtypes[dtype]

    def __hash__(self) -> int:
        return hash((self.name, self.version))


def read_yaml(name: str) -> Any:
    """A data file of this package, loaded safely."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(files("planner.engines").joinpath(name).read_text("utf-8"), loader)  # noqa: S506 (safe loader)


@cache
def engines() -> dict[str, EngineSpec]:
    """All engines by name, from support.yaml."""
    found = {}
    for name, row in read_yaml("support.yaml").items():
        rows = tuple(PrecisionSupport(precision=p, **r) for p, r in row.pop("precisions").items())
        row.pop("cpu_source", None)
        found[name] = EngineSpec(name=name, precisions=rows, vendors=tuple(row.pop("vendors")), **row)
    return found


@cache
def engine_on_cpu(name: str) -> EngineSpec | None:
    """The engine as it runs on CPU devices, or None: what support.yaml says with `cpu: true`."""
    spec = engine(name)
    rows = tuple(row for row in spec.precisions if row.cpu)
    kv = {dtype: 0.0 for dtype in spec.kv_dtypes if dtype in {row.precision for row in rows}}
    return replace(spec, vendors=("cpu",), precisions=rows, kv_dtypes=kv, device="cpu") if rows else None


def engine(name: str) -> EngineSpec:
    """The engine of that name; UnknownNameError with the nearest names otherwise."""
    table = engines()
    if name not in table:
        raise UnknownNameError("engine", name, table)
    return table[name]

"""Who runs a model: one EngineSpec per engine, read from data. Which axes, precisions and GPUs it supports."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from planner.errors import UnknownNameError
from planner.hardware.records import Gpu


@dataclass(frozen=True)
class PrecisionSupport:
    """A precision an engine can run: from which compute capability (None = not on that vendor), and with which flags."""

    precision: str
    min_compute_capability: float | None
    amd: bool
    flag: str | None
    needs_checkpoint: bool
    note: str = ""


@dataclass(frozen=True)
class EngineSpec:
    """An inference engine at a version.

    batching: 'continuous' (iteration-level scheduling with chunked prefill), or 'static' (a batch runs to its end).
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

    def supports_gpu(self, gpu: Gpu) -> bool:
        """True when the engine has kernels for this GPU."""
        if gpu.vendor not in self.vendors:
            return False
        return gpu.vendor != "nvidia" or (gpu.compute_capability or 0) >= self.min_compute_capability

    def support(self, precision: str, gpu: Gpu) -> PrecisionSupport | None:
        """How this engine runs the precision on this GPU; None when it cannot."""
        for row in self.precisions:
            if row.precision != precision:
                continue
            if gpu.vendor == "amd":
                return row if row.amd else None
            if gpu.vendor == "nvidia" and row.min_compute_capability is not None and (gpu.compute_capability or 0) >= row.min_compute_capability:
                return row
        return None

    def supports_kv(self, dtype: str, gpu: Gpu) -> bool:
        """True when the engine stores its KV cache in dtype on this GPU."""
        if dtype not in self.kv_dtypes:
            return False
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
        found[name] = EngineSpec(name=name, precisions=rows, vendors=tuple(row.pop("vendors")), **row)
    return found


def engine(name: str) -> EngineSpec:
    """The engine of that name; UnknownNameError with the nearest names otherwise."""
    table = engines()
    if name not in table:
        raise UnknownNameError("engine", name, table)
    return table[name]

"""Weight precisions and KV-cache dtypes: records; the table is precisions.yaml beside this file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from planner.errors import UnknownNameError

UNQUANTISED = ("bf16", "fp16", "fp32")  # as weights are trained: an engine casts one to another while it loads


@dataclass(frozen=True)
class Precision:
    """How weights are stored and multiplied.

    bits: stored bits of one quantised weight. overhead_bits: scales and zero points, spread over the weights
    (group_size elements share one scale). compute_dtype: what the tensor cores multiply (a key of Gpu.peak_tflops);
    weight-only methods compute in 16 bit. quantises_*: whether embedding, head, attention are converted too.
    quantises_dense_mlp is False where only routed experts are. native_only: exists only as a checkpoint of that kind;
    servable: False when no engine here loads it (GGUF), the precision is there to read such checkpoints.
    accuracy_loss_percent: expected relative loss of average task score against bf16, with its source.
    """

    name: str
    bits: float
    overhead_bits: float
    group_size: int | None
    compute_dtype: str
    weight_only: bool
    quantises_embedding: bool
    quantises_lm_head: bool
    quantises_attention: bool
    accuracy_loss_percent: float
    accuracy_source: str
    source: str
    verified: bool
    quantises_dense_mlp: bool = True
    native_only: bool = False
    servable: bool = True

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of one converted weight, scales included."""
        return (self.bits + self.overhead_bits) / 8


@dataclass(frozen=True)
class KvDtype:
    """How keys and values are stored; accuracy_loss_percent adds to that of the weights."""

    name: str
    bytes_per_element: float
    accuracy_loss_percent: float
    accuracy_source: str
    source: str
    verified: bool

    def __hash__(self) -> int:
        return hash(self.name)


@cache
def _tables() -> tuple[dict[str, Precision], dict[str, KvDtype]]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = files("planner.models").joinpath("precisions.yaml").read_text("utf-8")
    raw = yaml.load(text, loader)  # noqa: S506 (safe loader)
    weights = {name: Precision(name=name, **row) for name, row in raw["weights"].items()}
    kv = {name: KvDtype(name=name, **row) for name, row in raw["kv_cache"].items()}
    return weights, kv


def precision(name: str) -> Precision:
    """The weight precision of that name; UnknownNameError with the nearest names otherwise."""
    table = _tables()[0]
    if name not in table:
        raise UnknownNameError("precision", name, table)
    return table[name]


def kv_dtype(name: str) -> KvDtype:
    """The KV-cache dtype of that name; UnknownNameError with the nearest names otherwise."""
    table = _tables()[1]
    if name not in table:
        raise UnknownNameError("KV-cache dtype", name, table)
    return table[name]


def precisions() -> tuple[Precision, ...]:
    """All weight precisions, in the order of the table (most exact first)."""
    return tuple(_tables()[0].values())


def kv_dtypes() -> tuple[KvDtype, ...]:
    """All KV-cache dtypes."""
    return tuple(_tables()[1].values())

"""The answer: frozen, versioned, the same tree as plan.yaml and `solve --json`.

Field names are a contract (docs/plan.md): other programs read them. Memory in GiB per GPU on the fullest rank,
latencies in ms, prices in USD.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 1
Status = Literal["optimal", "feasible", "infeasible"]


@dataclass(frozen=True)
class Range:
    """A prediction with its 80% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class OfferChoice:
    """How many of which machine, where, at which price."""

    provider: str
    instance_type: str
    region: str
    tier: str
    count: int
    gpu: str
    gpus_per_instance: int
    usd_per_hour: float
    observed_at: str
    source: str
    fabric: str | None = None


@dataclass(frozen=True)
class ServeSettings:
    """Engine settings of one replica. attention_data_parallel: attention groups inside the replica (1 = plain TP)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    gpu_memory_utilization: float | None = None
    attention_data_parallel: int = 1


@dataclass(frozen=True)
class Deployment:
    """What to start, on what. data_parallel = replicas; gpus = in use (not in the rented machines)."""

    engine: str
    engine_version: str
    precision: str
    kv_cache_dtype: str
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    expert_parallel: int
    context_parallel: int
    gpus: int
    offers: tuple[OfferChoice, ...]
    serve: ServeSettings | None = None
    train: dict[str, Any] | None = None

    @property
    def gpus_per_replica(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def nodes_per_replica(self) -> int:
        """Machines one replica spans (1 when it fits in one)."""
        return max(1, -(-self.gpus_per_replica // self.offers[0].gpus_per_instance)) if self.offers else 1


@dataclass(frozen=True)
class MemoryUse:
    """GiB on the fullest GPU of a replica; kv_cache_tokens is the pool of one replica; host_ram_gib per machine."""

    gpu_usable_gib: float
    weights_gib: float
    kv_cache_gib: float
    activations_gib: float
    runtime_gib: float
    total_gib: float
    headroom_gib: float
    kv_cache_tokens: int
    host_ram_gib: float | None = None
    gradients_gib: float = 0.0
    optimizer_gib: float = 0.0


@dataclass(frozen=True)
class Cost:
    """USD per hour of all rented machines, per million output tokens at the planned load, total for a finite job."""

    usd_per_hour: float
    usd_per_million_output_tokens: float | None = None
    usd_total: float | None = None


@dataclass(frozen=True)
class Alternative:
    """Another answer of a different kind, and the reason it lost."""

    kind: str
    deployment: Deployment
    predicted: dict[str, Range]
    cost: Cost
    why_not: str


@dataclass(frozen=True)
class SolverReport:
    """What the solver says of its own answer. objective and best_bound in the unit of the goal."""

    status: str
    objective: float | None
    best_bound: float | None
    wall_s: float
    variables: int
    constraints: int
    candidates: int = 0
    pruned: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Relaxation:
    """Smallest change of one limit alone that makes the request feasible (in the limit's own unit)."""

    limit: str
    current: float | str
    needed: float | str
    unit: str = ""


@dataclass(frozen=True)
class Infeasible:
    """Which limits clash, and what would help."""

    core: tuple[str, ...]
    relaxations: tuple[Relaxation, ...]


@dataclass(frozen=True)
class ModelSummary:
    """The model as counted. source says where its dimensions come from."""

    name: str
    hf_id: str
    params_total: int
    params_active: int
    layers: int
    hidden: int
    vocab: int
    max_context: int
    moe: bool
    family: str
    source: str


@dataclass(frozen=True)
class Provenance:
    """Where the numbers come from."""

    planner_version: str
    catalog_date: str | None
    price_age_days: int | None
    calibration: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The whole answer. deployment, memory, predicted and cost are None / empty when status is infeasible."""

    schema_version: int
    status: Status
    task: Literal["serve", "train"]
    request: dict[str, Any]
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    model: ModelSummary
    deployment: Deployment | None
    memory: MemoryUse | None
    predicted: dict[str, Range]
    cost: Cost | None
    solver: SolverReport
    binding: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    infeasible: Infeasible | None
    provenance: Provenance
    validation: dict[str, Any] | None = None

"""The answer: frozen, versioned, the same tree as plan.yaml and `solve --json`.

Field names are a contract (docs/plan.md): other programs read them. Memory in GiB per GPU on the fullest rank,
latencies in ms, prices in USD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from planner.errors import PlanFileError
from planner.plan_check import check_layout, check_numbers, check_size, cut, short

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
    """How many of which machine, where, at which price.

    cpu_threads: threads of one device where the devices are shares of a CPU; None for accelerators, and then left out of files.
    """

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
    cpu_threads: int | None = None


@dataclass(frozen=True)
class ServeSettings:
    """Engine settings of one replica. attention_data_parallel: attention groups inside the replica (1 = plain TP)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    gpu_memory_utilization: float | None = None
    attention_data_parallel: int = 1


def stage_words(layers_per_stage: Sequence[int] | None) -> str:
    """Layers of each pipeline stage where they differ: '11, 2x 12, 7 layers'; empty where all are alike."""
    sizes = layers_per_stage or ()
    if len(set(sizes)) < 2:
        return ""
    runs = [(n, len([*same])) for n, same in groupby(sizes)]
    return ", ".join(f"{count}x {n}" if count > 1 else str(n) for n, count in runs) + " layers"


@dataclass(frozen=True)
class TrainSettings:
    """Framework settings of a training run (Deployment.engine names the framework, Deployment.precision the compute dtype).

    checkpoint_interval: layers per activation checkpoint (0 = none, 1 = every layer). offload: none, optimizer, or
    optimizer+parameters (to host memory). global_batch_size in sequences of seq_len tokens, of all data-parallel ranks.
    layers_per_stage: decoder layers of each pipeline stage, first to last (None = one stage).
    """

    method: Literal["full", "lora", "qlora"]
    zero_stage: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    checkpoint_interval: int
    offload: str
    optimizer: str
    seq_len: int
    global_batch_size: int
    steps: int
    packing: bool = True
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    frozen_precision: str | None = None
    chunked_loss: bool = False
    layers_per_stage: tuple[int, ...] | None = None


def on_host(train: TrainSettings | None) -> str:
    """What a training run keeps in host memory, in words."""
    kept = {
        "optimizer": "gradients and optimizer states",
        "optimizer+parameters": "weights, gradients and optimizer states",
    }
    if train is not None and train.offload in kept:
        return kept[train.offload]
    if train is not None and train.optimizer.startswith("paged"):
        return "the checkpoint while it is loaded, then paged optimizer states"
    return "the checkpoint while it is loaded"


@dataclass(frozen=True)
class Deployment:
    """What to start, on what. data_parallel = replicas; gpus = in use (not in the rented machines).

    checkpoint: hub id of the published checkpoint to load instead of the model's own, None = the model's own.
    """

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
    checkpoint: str | None = None
    train: TrainSettings | None = None

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
    """GiB on the fullest GPU of a replica; kv_cache_tokens is the pool of one replica; host_ram_gib per machine.

    The parts (weights, kv_cache, activations, runtime; training: gradients and optimizer too) sum to the total; what is offloaded
    is in host_ram_gib alone.
    """

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
    """What the solver says of its own answer.

    objective, best_bound: of the first objective: USD (cheapest), logarithmic 1% steps of duration (fastest), tokens/s.
    """

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
    native_precision: str = ""


@dataclass(frozen=True)
class Provenance:
    """Where the numbers come from. figures_of: digest of what memory, predictions and cost are of (planner.plan_seal); empty = not known."""

    planner_version: str
    catalog_date: str | None
    price_age_days: int | None
    calibration: tuple[str, ...] = ()
    figures_of: str = ""


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


_RENAMED = {"current": "from", "needed": "to"}


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The contract tree of a plan: plain dicts, lists, strings and numbers, in field order."""
    from dataclasses import asdict

    tree = asdict(plan)
    if plan.infeasible is not None:
        tree["infeasible"]["relaxations"] = [
            {_RENAMED.get(k, k): v for k, v in r.items()} for r in tree["infeasible"]["relaxations"]
        ]
    for deployed in (tree["deployment"], *(a["deployment"] for a in tree["alternatives"])):
        for offer in deployed["offers"] if deployed else ():
            if offer["cpu_threads"] is None:
                del offer["cpu_threads"]
    listed: dict[str, Any] = plain(tree)
    return listed


def plain(value: Any) -> Any:
    """Tuples as lists, keys as strings, all the way down."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def plan_from_dict(tree: Any) -> Plan:
    """The plan of a contract tree. Raises PlanFileError naming the first field that does not fit."""
    from pydantic import TypeAdapter, ValidationError

    from planner.plan_fields import check_fields
    from planner.request import ServeRequest, TrainRequest

    if not isinstance(tree, dict) or "schema_version" not in tree:
        raise PlanFileError(
            "this is not a plan",
            "no schema_version at its top",
            "Give a plan.yaml or plan.json that `planner solve --out DIR` wrote.",
        )
    if tree["schema_version"] != SCHEMA_VERSION:
        raise PlanFileError(
            f"plan schema_version {short(tree['schema_version'])} is not {SCHEMA_VERSION}",
            "another version of planner wrote it",
            "Solve again with this one.",
        )
    check_size(tree)
    back = {v: k for k, v in _RENAMED.items()}
    tree = dict(tree)
    try:
        if isinstance(tree.get("infeasible"), dict):
            relaxations = [{back.get(k, k): v for k, v in r.items()} for r in tree["infeasible"].get("relaxations", [])]
            tree["infeasible"] = {**tree["infeasible"], "relaxations": relaxations}
        plan = TypeAdapter(Plan).validate_python(tree, strict=False)
    except (ValidationError, AttributeError, TypeError) as error:
        why = cut(str(error)) if not isinstance(error, ValidationError) else ""
        if isinstance(error, ValidationError):
            check_fields(tree, Plan)  # a slip in a name is said before the field that is missing for it
            first = error.errors()[0]
            why = f"{cut('.'.join(str(p) for p in first['loc']))}: {cut(first['msg'])}"
        raise PlanFileError("the plan cannot be read", why, "Solve again, or mend that field.") from None
    check_fields(tree, Plan)
    checked = plan_to_dict(plan)
    check_numbers(checked)
    check_layout(checked)
    check_fields(plan.request, TrainRequest if plan.task == "train" else ServeRequest, "request")
    return plan


def plan_to_yaml(plan: Plan) -> str:
    """plan.yaml."""
    import yaml

    return yaml.safe_dump(plan_to_dict(plan), sort_keys=False, allow_unicode=True, width=120)


def plan_to_json(plan: Plan) -> str:
    """`solve --json`: the same tree."""
    import json

    return json.dumps(plan_to_dict(plan), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


MAX_PLAN_BYTES = 5_000_000


def load_plan(path: str | Path) -> Plan:
    """Read plan.yaml or plan.json back. Raises PlanFileError in one line for anything that is not a plan."""
    import json

    import yaml

    if not isinstance(path, str | Path):
        raise PlanFileError(
            f"a plan is read from a path, not from a {type(path).__name__}", "", "Give the path of a plan.yaml."
        )
    file = Path(path)
    try:
        if file.exists() and not file.is_file():
            raise PlanFileError(
                f"{str(file)!r} is not a regular file", "", "Give a plan.yaml that `planner solve --out DIR` wrote."
            )
        with file.open("rb") as stream:
            raw = stream.read(MAX_PLAN_BYTES + 1)
    except OSError as error:
        raise PlanFileError(
            f"cannot read the plan {str(file)!r}",
            error.strerror or "",
            "Give a plan.yaml that `planner solve --out DIR` wrote.",
        ) from None
    if len(raw) > MAX_PLAN_BYTES:
        raise PlanFileError(
            f"{str(file)!r} is larger than any plan",
            f"over {MAX_PLAN_BYTES} bytes",
            "Give a plan.yaml that `planner solve --out DIR` wrote.",
        )
    try:
        text = raw.decode("utf-8")
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        tree = json.loads(text) if text.lstrip().startswith("{") else yaml.load(text, loader)  # noqa: S506 (safe loader)
    except (UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0][:120]
        raise PlanFileError(
            f"{str(file)!r} is neither YAML nor JSON", reason, "Give a plan.yaml that `planner solve --out DIR` wrote."
        ) from None
    return plan_from_dict(tree)

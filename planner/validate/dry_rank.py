"""One rank of a training plan as the dry run counts it, and the plans it does not count, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from planner.engines.training import framework
from planner.errors import InvalidValueError
from planner.estimator.time.surfaces import read_data
from planner.plan import Deployment, TrainSettings
from planner.validate.dry_model import DTYPES, EXPERT_TYPES

STAGES = {"fsdp2": (0, 2, 3), "deepspeed": (0, 1, 2, 3), "ddp": (0,)}
OPTIMIZERS = ("adamw", "adamw-bf16")
OWN_MODEL = "{} builds its own model, not the transformers one that is counted here"


@dataclass(frozen=True)
class Lora:
    """Adapters as the launch files make them. fp32: the adapters are kept in fp32 over a 16-bit base."""

    rank: int
    targets: tuple[str, ...]
    fp32: bool


@dataclass(frozen=True)
class Rank:
    """What is counted. world: data-parallel ranks; interval: layers per checkpoint; several: more than one micro-batch a step.

    first, last: this pipeline stage has the embedding, the head; in_flight: micro-batches forward before the first backward.
    chunk: tokens of a chunk of the loss (0 = whole). resident: a CPU process, whose memory is what it has written.
    """

    engine: str
    world: int
    stage: int
    micro_batch: int
    seq_len: int
    interval: int
    dtype: str
    pure: bool
    several: bool
    tensor: int = 1
    lora: Lora | None = None
    offload: str = "none"
    chunk: int = 0
    first: bool = True
    last: bool = True
    in_flight: int = 1
    resident: bool = False

    @property
    def sharded(self) -> bool:
        """Weights are sharded by torch's own fully_shard."""
        return self.engine == "fsdp2"

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch * self.seq_len


@dataclass(frozen=True)
class Stage:
    """One pipeline stage to count: its layers and the rank that holds it."""

    layers: int
    rank: Rank


def refuse(dep: Deployment, model_type: str) -> None:
    """InvalidValueError for what the dry run does not count, with the reason."""
    train, why = dep.train, ""
    if dep.context_parallel > 1:
        why = "context parallelism runs its ring on real attention kernels"
    elif train is None:
        why = _serving_reason(dep)
    elif dep.engine not in STAGES:
        why = OWN_MODEL.format(dep.engine)
    elif dep.expert_parallel > 1:
        why = "expert parallelism sends tokens by their values, which fake tensors do not have"
    else:
        why = _training_reason(dep, train, model_type)
    if why:
        raise InvalidValueError("the dry run cannot count this plan", why, "Take the estimate with its interval.")


def _serving_reason(dep: Deployment) -> str:
    if dep.pipeline_parallel > 1:
        return "stages of a serving pipeline are cut by the engine, not by transformers"
    if dep.expert_parallel > 1 or (dep.serve and dep.serve.attention_data_parallel > 1):
        return "attention groups and expert parallelism are cut by the engine, not by transformers"
    return ""


def _training_reason(dep: Deployment, train: TrainSettings, model_type: str) -> str:
    if train.zero_stage not in STAGES[dep.engine]:
        return f"{dep.engine} has no ZeRO stage {train.zero_stage}"
    if train.method == "qlora":
        return "4-bit kernels (bitsandbytes) do not run on fake tensors"
    if train.optimizer not in OPTIMIZERS:
        return f"states of {train.optimizer} are made by its own kernels; counted are {' and '.join(OPTIMIZERS)}"
    if dep.precision not in DTYPES:
        return f"{dep.precision} layers come from kernels that do not run on fake tensors"
    if dep.tensor_parallel > 1 and model_type in EXPERT_TYPES:
        return "DeepSpeed's AutoTP does not cut experts"
    if dep.tensor_parallel > 1 and (dep.pipeline_parallel > 1 or train.method != "full"):
        return "DeepSpeed's AutoTP combines neither with stages nor with adapters"
    return ""


def launch_facts() -> dict[str, Any]:
    """What the launch files of training are written with (names of layers, chunk of the loss, buckets)."""
    found: dict[str, Any] = read_data("planner.emit.train", "facts.yaml")
    return found


def rank_of(dep: Deployment, train: TrainSettings) -> Rank:
    """The rank of a plan with one pipeline stage."""
    engine = "ddp" if dep.engine == "fsdp2" and train.zero_stage == 0 else dep.engine
    pure = train.optimizer == "adamw-bf16"
    lora = None
    if train.method == "lora":
        table = launch_facts()["lora_targets"]
        names = [n for target in train.lora_targets or tuple(table) for n in table.get(target, [target])]
        lora = Lora(train.lora_rank or 16, tuple(names), engine != "deepspeed" and not pure)
    return Rank(
        engine, dep.data_parallel, train.zero_stage, train.micro_batch_size, train.seq_len, train.checkpoint_interval,
        dep.precision, pure, train.gradient_accumulation_steps > 1, dep.tensor_parallel, lora, train.offload,
        int(launch_facts()["training"]["loss_chunk_tokens"]) if train.chunked_loss else 0,
        resident=any(offer.cpu_threads is not None for offer in dep.offers),
    )  # fmt: skip


def stages_of_plan(dep: Deployment, train: TrainSettings, layers: int) -> tuple[Stage, ...]:
    """The pipeline stages that can be worst: first, last, and of the middle the fullest; one stage without a pipeline."""
    rank, stages = rank_of(dep, train), dep.pipeline_parallel
    if stages == 1:
        return (Stage(layers, rank),)
    sizes = list(train.layers_per_stage or [])
    if len(sizes) != stages or sum(sizes) != layers:
        raise InvalidValueError(
            "the plan does not say which layers a stage holds", "train.layers_per_stage", "Solve again."
        )
    middle = max(range(1, stages - 1), key=lambda i: sizes[i], default=0)
    chosen = dict.fromkeys((0, middle, stages - 1))
    found = []
    for i in chosen:
        flight = min(stages - i, train.gradient_accumulation_steps)
        found.append(Stage(sizes[i], replace(rank, first=i == 0, last=i == stages - 1, in_flight=flight)))
    return tuple(found)


def words(rank: Rank) -> str:
    """Micro-batch and checkpoints in words."""
    layers = {0: "no layer", 1: "every layer"}.get(rank.interval, f"every {rank.interval} layers")
    return f"micro-batch {rank.micro_batch} x {rank.seq_len} tokens, {layers} checkpointed"


def stops_early(rank: Rank) -> bool:
    """Whether recomputation ends at the last tensor that backward needs (training.yaml, early_stop, early_stop_below)."""
    n = framework(rank.engine).number
    return n("early_stop") > 0 and rank.stage < n("early_stop_below")

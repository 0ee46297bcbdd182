"""What is asked: the model, the workload, the goal and the limits. Frozen; checked when made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from os import PathLike
from typing import Any, Literal

from planner.errors import InvalidValueError, UnknownNameError

Goal = Literal["cheapest", "fastest", "throughput"]
GOALS: tuple[Goal, ...] = ("cheapest", "fastest", "throughput")
TIERS = ("on_demand", "spot", "reserved")


def _check_positive(value: float | None, what: str, example: str) -> None:
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value <= 0
    ):
        raise InvalidValueError(
            f"{what} must be a positive, finite number, not {value!r}", "", f"Write for example {example}."
        )


def _check_most(value: float | None, what: str, most: float) -> None:
    if value is not None and value > most:
        raise InvalidValueError(f"{what} is {value:g}", f"no run has more than {most:g}", "Check the unit: 1B is 1e9.")


def _check_name(value: object, kind: str, known: Sequence[str]) -> None:
    if value not in known:
        raise UnknownNameError(kind, str(value), known)


def _check_kind(value: object, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise InvalidValueError(
            f"{what} must be a {kind.__name__}, not {type(value).__name__}", "", "See docs/python-api.md."
        )


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (Integral,), "float": (Real,), "str": (str,), "bool": (bool,), "tuple[str, ...]": (tuple, list),
}  # fmt: skip
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a str",
    "bool": "True or False",
    "tuple[str, ...]": "a tuple of str",
}


def _check_fields(record: Any) -> None:
    """InvalidValueError for the first field whose value has not the type it is declared with; other types than _KINDS are left alone."""
    for f in fields(record):
        declared, value = str(f.type).removesuffix(" | None"), getattr(record, f.name)
        if declared not in _KINDS or (value is None and declared != str(f.type)):
            continue
        wrong = not isinstance(value, _KINDS[declared]) or (isinstance(value, bool) and declared != "bool")
        inside = value if declared.startswith("tuple") and not wrong else ()
        if wrong or not all(isinstance(part, str | PathLike) for part in inside):
            shown = f"{value!r}" if len(repr(value)) < 60 else type(value).__name__
            raise InvalidValueError(
                f"{type(record).__name__}.{f.name} must be {_WORDS[declared]}, not {shown}",
                "",
                "See docs/python-api.md.",
            )


def check_type(value: object, kinds: tuple[type, ...], what: str, next_step: str) -> None:
    """InvalidValueError naming the expected types for a value of another one."""
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidValueError(f"{what} must be a {wanted}, not {type(value).__name__}", "", next_step)


@dataclass(frozen=True)
class Workload:
    """The load to carry: requests per second, or a number of users with one request in flight each.

    input_tokens and output_tokens are means per request. Exactly one of rate_per_s and concurrency is set.
    """

    input_tokens: int = 1024
    output_tokens: int = 256
    rate_per_s: float | None = 1.0
    concurrency: int | None = None

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_positive(self.input_tokens, "--input-tokens", "--input-tokens 1024")
        _check_positive(self.output_tokens, "--output-tokens", "--output-tokens 256")
        _check_positive(self.rate_per_s, "--rate", "--rate 1")
        _check_positive(self.concurrency, "--concurrency", "--concurrency 16")
        if (self.rate_per_s is None) == (self.concurrency is None):
            raise InvalidValueError(
                "give either --rate or --concurrency", "the load is one of the two", "Drop one of them."
            )


@dataclass(frozen=True)
class Limits:
    """What the answer must keep. None = no limit. ttft: 95th percentile; tpot, e2e: means. max_accuracy_loss in percent."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    budget_usd_per_hour: float | None = None
    max_gpus: int | None = None
    max_accuracy_loss_percent: float = 1.0
    min_throughput_tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_positive(self.ttft_s, "--latency", "--latency 200ms")
        _check_positive(self.tpot_s, "--tpot", "--tpot 40ms")
        _check_positive(self.e2e_s, "--e2e", "--e2e 10s")
        _check_positive(self.budget_usd_per_hour, "--budget", "--budget 20/h")
        _check_positive(self.max_gpus, "--max-gpus", "--max-gpus 8")
        _check_positive(self.min_throughput_tokens_per_s, "--min-throughput", "--min-throughput 500")
        if not 0 <= self.max_accuracy_loss_percent <= 100:
            raise InvalidValueError(
                f"--max-accuracy-loss must be 0 to 100 percent, not {self.max_accuracy_loss_percent:g}",
                "",
                "Write for example --max-accuracy-loss 1%.",
            )


@dataclass(frozen=True)
class HardwareFilter:
    """Where to look. Empty = everywhere. owned: machines as 'COUNTxGPU' or 'NODESxCOUNTxGPU', see --on."""

    providers: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    instance_types: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ("on_demand",)
    owned: str | None = None
    fabric_gbps: float | None = None
    catalog_dirs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class Pins:
    """Axes fixed by the user; None = the solver decides.

    unpublished_checkpoints: also search quantised formats for which no published checkpoint of the model is known, so
    that one must be made first (a pinned precision is searched in any case).
    """

    engine: str | None = None
    precision: str | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    unpublished_checkpoints: bool = False
    expert_parallel: int | None = None
    attention_data_parallel: int | None = None

    def __post_init__(self) -> None:
        _check_fields(self)


Risk = Literal["high", "low"]
RISKS: tuple[Risk, ...] = ("high", "low")


@dataclass(frozen=True)
class ServeRequest:
    """A serving problem: find the deployment of `model` that is best for `goal` and keeps all `limits`.

    risk: what limits are held against: "high" the prediction itself, "low" the bad end of its 80% range, so that about nine in ten hold.
    """

    model: str
    goal: Goal = "cheapest"
    workload: Workload = field(default_factory=Workload)
    limits: Limits = field(default_factory=Limits)
    hardware: HardwareFilter = field(default_factory=HardwareFilter)
    pins: Pins = field(default_factory=Pins)
    time_limit_s: float = 30.0
    seed: int = 0
    risk: Risk = "high"
    task: Literal["serve"] = "serve"

    def __post_init__(self) -> None:
        _check_kind(self.model, str, "model")
        _check_name(self.goal, "goal", GOALS)
        _check_name(self.risk, "risk", RISKS)
        for value, kind in (
            (self.workload, Workload),
            (self.limits, Limits),
            (self.hardware, HardwareFilter),
            (self.pins, Pins),
        ):
            _check_kind(value, kind, kind.__name__.lower())
        _check_positive(self.time_limit_s, "--time-limit", "--time-limit 30s")


TrainMethod = Literal["full", "lora", "qlora"]
METHODS: tuple[TrainMethod, ...] = ("full", "lora", "qlora")
OPTIMIZERS = ("adamw", "adamw-bf16", "adamw-8bit", "paged-adamw-8bit", "adafactor", "muon")
TRAIN_PRECISIONS = ("bf16", "fp16", "fp8")
OFFLOADS = ("none", "optimizer", "optimizer+parameters")


@dataclass(frozen=True)
class TrainJob:
    """What is trained: everything the estimators need besides model, hardware and layout.

    tokens: of the whole run (samples x epochs x mean length are turned into it before). seq_len: tokens of one packed
    sequence. batch_tokens_low .. high: global batch the user allows, in tokens (equal = fixed; None = the solver's
    default range). optimizer: adamw keeps fp32 states and fp32 masters, adamw-bf16 keeps all in bf16.
    """

    method: TrainMethod = "full"
    tokens: float = 1e9
    seq_len: int = 4096
    packing: bool = True
    batch_tokens_low: float | None = None
    batch_tokens_high: float | None = None
    optimizer: str = "adamw"
    precision: str = "bf16"
    lora_rank: int = 16
    lora_targets: tuple[str, ...] = ("attention", "mlp")
    frozen_precision: str | None = None
    chunked_loss: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_name(self.method, "method", METHODS)
        _check_name(self.optimizer, "optimizer", OPTIMIZERS)
        _check_positive(self.tokens, "--tokens", "--tokens 1B")
        if self.tokens < 1:
            raise InvalidValueError(
                f"--tokens is {self.tokens:g}", "a run has a token at least", "Check the unit: 1B is 1e9."
            )
        _check_most(self.tokens, "--tokens", 1e18)
        _check_positive(self.seq_len, "--seq-len", "--seq-len 8192")
        _check_positive(self.batch_tokens_low, "--global-batch", "--global-batch 1M")
        _check_positive(self.batch_tokens_high, "--global-batch", "--global-batch 1M")
        _check_most(self.batch_tokens_low, "--global-batch", 1e12)
        _check_most(self.batch_tokens_high, "--global-batch", 1e12)
        _check_positive(self.lora_rank, "--lora-rank", "--lora-rank 16")


@dataclass(frozen=True)
class TrainLimits:
    """What the answer must keep. None = no limit. deadline and step in seconds; budget for the whole run, rate per hour."""

    deadline_s: float | None = None
    step_s: float | None = None
    budget_usd: float | None = None
    budget_usd_per_hour: float | None = None
    max_gpus: int | None = None

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_positive(self.deadline_s, "--deadline", "--deadline 24h")
        _check_positive(self.step_s, "--step-time", "--step-time 10s")
        _check_positive(self.budget_usd, "--budget", "--budget 500")
        _check_positive(self.budget_usd_per_hour, "--budget", "--budget 20/h")
        _check_positive(self.max_gpus, "--max-gpus", "--max-gpus 64")


@dataclass(frozen=True)
class TrainPins:
    """Axes fixed by the user; None = the solver decides."""

    framework: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    context_parallel: int | None = None
    data_parallel: int | None = None
    expert_parallel: int | None = None
    zero_stage: int | None = None
    micro_batch_size: int | None = None
    checkpoint_interval: int | None = None
    offload: str | None = None

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class TrainRequest:
    """A training problem: cheapest or fastest run of `job` on `model` that keeps all `limits`. risk: as for ServeRequest; GPU memory is one of
    the limits, and costs are compared at the bad end too."""

    model: str
    goal: Goal = "cheapest"
    job: TrainJob = field(default_factory=TrainJob)
    limits: TrainLimits = field(default_factory=TrainLimits)
    hardware: HardwareFilter = field(default_factory=HardwareFilter)
    pins: TrainPins = field(default_factory=TrainPins)
    time_limit_s: float = 30.0
    seed: int = 0
    risk: Risk = "high"
    task: Literal["train"] = "train"

    def __post_init__(self) -> None:
        _check_kind(self.model, str, "model")
        _check_name(self.goal, "goal", GOALS)
        for value, kind in (
            (self.job, TrainJob),
            (self.limits, TrainLimits),
            (self.hardware, HardwareFilter),
            (self.pins, TrainPins),
        ):
            _check_kind(value, kind, kind.__name__.lower())
        _check_name(self.job.precision, "training precision", TRAIN_PRECISIONS)
        _check_name(self.risk, "risk", RISKS)
        _check_positive(self.time_limit_s, "--time-limit", "--time-limit 30s")

"""What is asked: the model, the workload, the goal and the limits. Frozen; checked when made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from planner.errors import InvalidValueError

Goal = Literal["cheapest", "fastest", "throughput"]
GOALS: tuple[Goal, ...] = ("cheapest", "fastest", "throughput")
TIERS = ("on_demand", "spot", "reserved")


def _check_positive(value: float | None, what: str, example: str) -> None:
    if value is not None and (not math.isfinite(value) or value <= 0):
        raise InvalidValueError(f"{what} must be a positive, finite number, not {value!r}", "", f"Write for example {example}.")


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
        _check_positive(self.input_tokens, "--input-tokens", "--input-tokens 1024")
        _check_positive(self.output_tokens, "--output-tokens", "--output-tokens 256")
        _check_positive(self.rate_per_s, "--rate", "--rate 1")
        _check_positive(self.concurrency, "--concurrency", "--concurrency 16")
        if (self.rate_per_s is None) == (self.concurrency is None):
            raise InvalidValueError("give either --rate or --concurrency", "the load is one of the two", "Drop one of them.")


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
        _check_positive(self.ttft_s, "--latency", "--latency 200ms")
        _check_positive(self.tpot_s, "--tpot", "--tpot 40ms")
        _check_positive(self.e2e_s, "--e2e", "--e2e 10s")
        _check_positive(self.budget_usd_per_hour, "--budget", "--budget 20/h")
        _check_positive(self.max_gpus, "--max-gpus", "--max-gpus 8")
        _check_positive(self.min_throughput_tokens_per_s, "--min-throughput", "--min-throughput 500")
        if not math.isfinite(self.max_accuracy_loss_percent) or self.max_accuracy_loss_percent < 0:
            raise InvalidValueError(f"--max-accuracy-loss must be 0 or more percent, not {self.max_accuracy_loss_percent!r}", "", "Write for example --max-accuracy-loss 1%.")


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


@dataclass(frozen=True)
class Pins:
    """Axes fixed by the user; None = the solver decides."""

    engine: str | None = None
    precision: str | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None


@dataclass(frozen=True)
class ServeRequest:
    """A serving problem: find the deployment of `model` that is best for `goal` and keeps all `limits`."""

    model: str
    goal: Goal = "cheapest"
    workload: Workload = field(default_factory=Workload)
    limits: Limits = field(default_factory=Limits)
    hardware: HardwareFilter = field(default_factory=HardwareFilter)
    pins: Pins = field(default_factory=Pins)
    time_limit_s: float = 30.0
    seed: int = 0
    task: Literal["serve"] = "serve"

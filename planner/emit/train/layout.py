"""What a training plan means on machines, and what no launch file can do for it. Every training file is written from this."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from planner.emit.layout import checked_text, vendor_of
from planner.emit.layout import facts as serving_facts
from planner.emit.train.limits import refusals
from planner.engines.training import WRITTEN_PRECISIONS
from planner.errors import InvalidValueError, NoPlanError, PlanFileError
from planner.plan import Deployment, OfferChoice, Plan, TrainSettings


@cache
def facts() -> dict[str, Any]:
    """facts.yaml of the training files. Read once."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = files("planner.emit.train").joinpath("facts.yaml").read_text("utf-8")
    data: dict[str, Any] = yaml.load(text, loader)  # noqa: S506 (safe loader)
    return data


@dataclass(frozen=True)
class TrainLayout:
    """The plan laid out. machines: in use; gpus_per_machine: processes on each. model: hub id or folder."""

    plan: Plan
    deployment: Deployment
    train: TrainSettings
    offer: OfferChoice
    model: str
    vendor: str
    machines: int
    gpus_per_machine: int

    @property
    def engine(self) -> str:
        """The framework."""
        return self.deployment.engine

    @property
    def title(self) -> str:
        """The framework's own name."""
        return str(facts()["titles"][self.engine])

    @property
    def label(self) -> str:
        """A name that Kubernetes, Slurm and SkyPilot accept (DNS label)."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.model.rsplit("/", 1)[-1].lower()).strip("-")[:40].strip("-")
        return f"train-{slug}" if slug else "train"

    @property
    def owned(self) -> bool:
        """True when the machines are the user's own."""
        return self.offer.tier == "owned" or self.offer.provider == "owned"

    @property
    def gated(self) -> bool:
        """True when the hub asks for an accepted licence and a token."""
        return self.model.startswith(tuple(serving_facts()["gated"]))

    @property
    def learning_rate(self) -> float:
        """A starting point by method; the planner does not decide it."""
        return float(facts()["training"]["learning_rate"][self.train.method])

    @property
    def save_every(self) -> int:
        """Steps between checkpoints."""
        return max(1, self.train.steps // int(facts()["training"]["checkpoints_per_run"]))

    @property
    def packages(self) -> list[str]:
        """What pip installs for this plan."""
        table, extras = facts()["packages"], facts()["extras"]
        names = [p.format(version=self.deployment.engine_version) for p in table[self.engine]]
        if self.engine in ("deepspeed", "fsdp2"):
            names.append(extras["data"])
            names += [extras["lora"]] if self.train.method != "full" else []
            names += [extras["qlora"]] if self.train.method == "qlora" or self.optim.endswith("bnb_8bit") else []
        if self.optim == "adamw_torch_8bit" or self.deployment.precision == "fp8":
            names += [extras["torchao"]] if self.engine in ("fsdp2", "torchtitan") else []
        return list(dict.fromkeys(names))

    @property
    def optim(self) -> str:
        """TrainingArguments.optim (transformers 5.24.0) of the planned optimizer."""
        sharded = self.engine == "fsdp2" and self.train.zero_stage > 0
        names = {
            "adamw": "adamw_torch" if self.engine == "deepspeed" else "adamw_torch_fused",
            "adamw-bf16": "adamw_torch" if self.engine == "deepspeed" else "adamw_torch_fused",
            "adamw-8bit": "adamw_torch_8bit" if sharded else "adamw_bnb_8bit",
            "paged-adamw-8bit": "paged_adamw_8bit",
            "adafactor": "adafactor",
            "muon": "adamw_torch",
        }
        return names[self.train.optimizer]


def layout_of(plan: Plan) -> TrainLayout:
    """The plan over its machines. NoPlanError: nothing to launch; InputError: the plan contradicts itself."""
    dep = plan.deployment
    if plan.status == "infeasible" or dep is None:
        raise NoPlanError(
            "this plan has no deployment to launch", "it is infeasible", "Relax a limit it names and solve again."
        )
    if plan.task != "train" or dep.train is None:
        raise PlanFileError(
            "this plan has no training settings", "it looks like a serving plan", "Solve with --task train."
        )
    if dep.engine == "ddp":  # the same scripts: accelerate's FSDP2 files without sharding are DDP
        dep = replace(dep, engine="fsdp2")
        plan = replace(plan, deployment=dep)
    if dep.train is None or dep.engine not in facts()["titles"]:
        raise InvalidValueError(
            f"there are no training files for {dep.engine!r}", "", f"Frameworks: {', '.join(facts()['titles'])}."
        )
    for offer in dep.offers:
        for text in (offer.provider, offer.instance_type, offer.region, offer.gpu):
            checked_text(text, "a name in the plan's offers")
    checked_text(dep.engine_version, "the plan's framework version")
    for target in dep.train.lora_targets:
        checked_text(target, "a LoRA target")
    if dep.precision not in WRITTEN_PRECISIONS:
        raise InvalidValueError(f"{dep.engine} does not train in {dep.precision!r}", "", "Solve again.")
    _check_sizes(dep, dep.train)
    machines, share = _machines(dep)
    model = checked_text(plan.model.hf_id or plan.model.name, "the model")
    offer = dep.offers[0]
    laid = TrainLayout(plan, dep, dep.train, offer, model, vendor_of(offer), machines, share)
    _check_support(laid)
    return laid


def _check_sizes(dep: Deployment, train: TrainSettings) -> None:
    """Batch identity, ranks and layers per stage."""
    ranks = dep.gpus_per_replica * dep.data_parallel
    if not dep.offers or min(dep.data_parallel, dep.gpus_per_replica, *(o.gpus_per_instance for o in dep.offers)) < 1:
        raise PlanFileError("the plan's deployment has no machines, GPUs or replicas", "", "Solve again.")
    if ranks != dep.gpus:
        raise PlanFileError(f"the plan uses {dep.gpus} GPUs", f"its parallel sizes multiply to {ranks}", "Solve again.")
    rows = train.micro_batch_size * train.gradient_accumulation_steps * dep.data_parallel
    if rows != train.global_batch_size:
        raise PlanFileError(
            f"the plan's global batch is {train.global_batch_size} sequences",
            f"micro-batch x accumulation x data parallel is {rows}",
            "Solve again.",
        )
    if min(train.steps, train.seq_len, train.global_batch_size) < 1 or train.checkpoint_interval < 0:
        raise PlanFileError("the plan has no steps, no tokens or a negative checkpoint interval", "", "Solve again.")
    stages = train.layers_per_stage
    if stages is not None and (len(stages) != dep.pipeline_parallel or sum(stages) != _layers(train, stages)):
        raise PlanFileError("layers_per_stage does not name every pipeline stage", "", "Solve again.")


def _layers(train: TrainSettings, stages: tuple[int, ...]) -> int:
    return sum(stages) if min(stages) > 0 else -1


def _machines(dep: Deployment) -> tuple[int, int]:
    per = min(o.gpus_per_instance for o in dep.offers)
    machines = -(-dep.gpus // per)
    if dep.gpus % machines:
        raise PlanFileError(
            f"{dep.gpus} GPUs do not divide over {machines} machines of {per}",
            "frameworks want the same number on each",
            "Solve again with --max-gpus at a multiple.",
        )
    if machines > sum(o.count for o in dep.offers):
        raise PlanFileError(
            f"the plan needs {machines} machines", f"it has {sum(o.count for o in dep.offers)}", "Solve again."
        )
    return machines, dep.gpus // machines


def _check_support(laid: TrainLayout) -> None:
    """What the framework cannot do, in one line with the way out."""
    for wrong, why, way in refusals(laid.deployment, laid.train):
        if wrong:
            raise InvalidValueError(f"{laid.title} files cannot be written for this plan", why, way)

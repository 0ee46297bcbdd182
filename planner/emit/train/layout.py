"""What a training plan means on machines, and what no launch file can do for it. Every training file is written from this."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from planner.emit.layout import checked_text, vendor_of
from planner.emit.layout import facts as serving_facts
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
    if dep.engine not in facts()["titles"]:
        raise InvalidValueError(
            f"there are no training files for {dep.engine!r}", "", f"Frameworks: {', '.join(facts()['titles'])}."
        )
    for offer in dep.offers:
        for text in (offer.provider, offer.instance_type, offer.region, offer.gpu):
            checked_text(text, "a name in the plan's offers")
    checked_text(dep.engine_version, "the plan's framework version")
    for target in dep.train.lora_targets:
        checked_text(target, "a LoRA target")
    if dep.precision not in ("bf16", "fp16", "fp8", "fp32"):
        raise InvalidValueError(f"{dep.engine} does not train in {dep.precision!r}", "", "Solve again.")
    _check_sizes(dep, dep.train)
    machines, share = _machines(dep)
    model = checked_text(plan.model.hf_id or plan.model.name, "the model")
    offer = dep.offers[0]
    laid = TrainLayout(plan, dep, dep.train, offer, model, vendor_of(offer.gpu), machines, share)
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
    for wrong, why, way in _refusals(laid):
        if wrong:
            raise InvalidValueError(f"{laid.title} files cannot be written for this plan", why, way)


def _refusals(laid: TrainLayout) -> list[tuple[bool, str, str]]:
    dep, train = laid.deployment, laid.train
    tp, pp, cp, ep = dep.tensor_parallel, dep.pipeline_parallel, dep.context_parallel, dep.expert_parallel
    bigger, other = "Pin --framework torchtitan.", "Choose another --optimizer."
    if laid.engine == "deepspeed":
        return [
            (cp > 1 or ep > 1, "its Trainer has no context or expert parallelism here", bigger),
            (pp > 1 and tp > 1, "PipelineModule and AutoTP do not combine", bigger),
            (pp > 1 and train.zero_stage > 1, "PipelineModule refuses ZeRO 2 and 3", "Pin --zero-stage 1."),
            (pp > 1 and train.offload != "none", "PipelineModule keeps its states on the GPU", "Pin --offload none."),
            (pp > 1 and train.method != "full", "the pipeline script trains all weights", "Pin --pp 1."),
            (pp > 1 and train.optimizer not in ("adamw", "adamw-bf16"), "the pipeline script runs AdamW", other),
            (
                pp > 1 and train.layers_per_stage is None,
                "the plan does not say which layers a stage holds",
                "Solve again.",
            ),
            (pp > 1 and not train.packing, "the pipeline script has no padding mask", "Plan with packing."),
            (tp > 1 and train.zero_stage == 0, "AutoTP was only seen with ZeRO 1 to 3", "Pin --zero-stage 1."),
            (tp > 1 and train.method != "full", "AutoTP does not split adapters", "Pin --tp 1."),
            (dep.precision == "fp8", "it computes in bf16, fp16 or fp32", bigger),
            (
                train.method == "qlora" and train.zero_stage == 3,
                "ZeRO 3 does not shard 4-bit weights",
                "Pin --framework fsdp2 or --zero-stage 2.",
            ),
            (
                train.offload == "optimizer+parameters" and train.zero_stage < 3,
                "parameters leave the GPU only with ZeRO 3",
                "Pin --zero-stage 3.",
            ),
            (train.offload == "optimizer" and train.zero_stage < 1, "offload needs ZeRO", "Pin --zero-stage 1."),
            (
                train.optimizer == "adamw-bf16" and (train.zero_stage < 1 or dep.precision != "bf16"),
                "bf16 states need ZeRO 1 to 3 and bf16",
                other,
            ),
            (
                train.optimizer in ("adamw-8bit", "paged-adamw-8bit", "adafactor") and train.offload != "none",
                "its CPU optimizer is AdamW",
                other,
            ),
            (
                train.optimizer == "adafactor" and train.zero_stage > 0,
                "ZeRO flattens the weights, and then it saves nothing",
                other,
            ),
        ]
    if laid.engine == "fsdp2":
        return [
            (pp > 1 or ep > 1, "accelerate has no pipeline or expert parallelism for training", bigger),
            (tp > 1, "the Trainer cannot resume a model that transformers split by tensor", bigger),
            (cp > 1 and train.zero_stage == 0, "context parallelism needs FSDP2", "Pin --zero-stage 3."),
            (
                cp > 1 and (train.chunked_loss or not train.packing),
                "context parallelism wants whole, packed rows",
                bigger,
            ),
            (cp > 1 and train.seq_len % (2 * cp) > 0, f"{2 * cp} parts must divide the sequence", "Change --seq-len."),
            (train.optimizer == "adamw-bf16" and dep.precision != "bf16", "bf16 states need bf16", other),
            (dep.precision == "fp8", "the Trainer computes in bf16, fp16 or fp32", bigger),
            (train.zero_stage == 1, "FSDP2 shards gradients too", "Pin --zero-stage 2 or 3."),
            (
                train.offload == "optimizer",
                "FSDP2 moves states and parameters together",
                "Pin --offload optimizer+parameters.",
            ),
            (
                train.offload != "none" and train.zero_stage == 0,
                "DDP keeps everything on the GPU",
                "Pin --zero-stage 3.",
            ),
            (
                train.optimizer == "paged-adamw-8bit" and train.zero_stage > 0,
                "paged states cannot be sharded",
                "Choose --optimizer adamw-8bit.",
            ),
            (
                train.optimizer in ("muon", "adafactor") and train.zero_stage > 0,
                f"{train.optimizer} on sharded weights was never run",
                other,
            ),
            (train.optimizer == "muon", "the Trainer has no Muon", other),
        ]
    common = [
        (train.method != "full", "the script trains all weights", "Pin --framework fsdp2 or deepspeed."),
        (not train.packing, "it packs its samples", "Plan with packing."),
        (train.offload == "optimizer", "it does not offload states alone", "Pin --offload none."),
    ]
    if laid.engine == "torchtitan":
        return [
            *common,
            (dep.precision == "fp16", "it has no loss scaling", "Use bf16."),
            (train.optimizer == "adamw-bf16" and dep.precision != "bf16", "bf16 states need bf16", other),
            (train.checkpoint_interval > 1, "it checkpoints every layer or none", "Pin --checkpoint-interval 1."),
            (train.zero_stage == 1, "FSDP2 shards gradients too", "Pin --zero-stage 2 or 3."),
            (train.offload != "none" and train.zero_stage == 0, "only FSDP offloads", "Pin --zero-stage 3."),
            (train.optimizer not in ("adamw", "adamw-bf16"), "its script here runs AdamW", other),
        ]
    return [
        *common,
        (dep.precision == "fp32", "its recipes mix 16 or 8 bit", "Use bf16."),
        (train.offload != "none", "its states stay on the GPU", "Pin --offload none."),
        (train.optimizer != "adamw", "its script here runs AdamW with fp32 states", other),
        (
            pp > 1 and train.zero_stage > 1,
            "Megatron FSDP and pipeline stages were never combined here",
            "Pin --zero-stage 1.",
        ),
    ]

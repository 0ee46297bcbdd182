"""A training plan that was edited: framework, precision, adapters, stages and lengths must go together."""

from __future__ import annotations

from collections.abc import Sequence

from planner.engines.plan_words import MEND, check_version, known, wrong
from planner.engines.training import WRITTEN_PRECISIONS, Framework, framework, frameworks
from planner.errors import UnknownNameError
from planner.hardware.records import Gpu
from planner.plan import Deployment, Plan, TrainSettings
from planner.request import OFFLOADS, TRAIN_PRECISIONS


def check_training(plan: Plan, dep: Deployment, train: TrainSettings, gpus: Sequence[Gpu]) -> None:
    """Raises PlanFileError or UnknownNameError for the first value that cannot be. gpus: of the offers, none where they are not known."""
    try:
        stack = framework(dep.engine)
    except UnknownNameError as error:
        raise UnknownNameError(f"{error.kind} of the plan", error.name, error.suggestions, MEND) from None
    check_version(dep, {name: f.version for name, f in frameworks().items()})
    known("precision", dep.precision, dict.fromkeys((*stack.precisions, *WRITTEN_PRECISIONS)))
    known("optimizer", train.optimizer, stack.optimizers)
    known("method", train.method, stack.methods)
    known("offload", train.offload, OFFLOADS)
    for gpu in gpus:
        if dep.precision in TRAIN_PRECISIONS and dep.precision not in gpu.peak_tflops:
            have = ", ".join(name for name in TRAIN_PRECISIONS if name in gpu.peak_tflops)
            raise wrong(f"deployment.precision of the plan is {dep.precision}", f"{gpu.name} computes in {have}")
    _check_adapters(train)
    _check_stage(dep, train, stack)
    ranks = dep.tensor_parallel * dep.context_parallel * dep.data_parallel
    if ranks % dep.expert_parallel:
        raise wrong(
            f"deployment.expert_parallel of the plan is {dep.expert_parallel}",
            f"it must divide the {ranks} ranks of tensor, context and data parallelism",
        )
    if 0 < plan.model.max_context < train.seq_len:
        raise wrong(
            f"deployment.train.seq_len of the plan is {train.seq_len}",
            f"{plan.model.name} reads at most {plan.model.max_context} tokens",
        )
    if train.checkpoint_interval > plan.model.layers:
        raise wrong(
            f"deployment.train.checkpoint_interval of the plan is {train.checkpoint_interval}",
            f"{plan.model.name} has {plan.model.layers} layers",
        )


def _check_adapters(train: TrainSettings) -> None:
    """Rank and frozen weights go with the method."""
    if train.method == "full":
        for name, value in (("lora_rank", train.lora_rank), ("frozen_precision", train.frozen_precision)):
            if value is not None:
                raise wrong(
                    f"deployment.train.{name} of the plan is {value}", "the method is full: no weights are frozen"
                )
    elif train.lora_rank is None or train.lora_rank < 1:
        raise wrong(
            f"deployment.train.lora_rank of the plan is {train.lora_rank}", f"{train.method} needs a rank of 1 or more"
        )
    if train.method == "qlora" and train.frozen_precision is None:
        raise wrong("deployment.train.frozen_precision of the plan is null", "qlora freezes weights of 4 bit")


def _check_stage(dep: Deployment, train: TrainSettings, stack: Framework) -> None:
    """The ZeRO stage is one that the framework has, beside the plan's pipeline, tensor parallelism and offload."""
    found: list[tuple[tuple[int, ...], str]] = [(stack.zero_stages, "")]
    if dep.pipeline_parallel > 1:
        found.append((stack.zero_with_pipeline, " with pipeline parallelism"))
    if dep.tensor_parallel > 1:
        found.append((stack.zero_with_tensor, " with tensor parallelism"))
    if train.offload != "none":
        found.append((stack.offloads.get(train.offload, ()), f" with offload of {train.offload}"))
    for stages, beside in found:
        if train.zero_stage not in stages:
            has = f"stages {', '.join(map(str, stages))}" if stages else "no ZeRO stage"
            raise wrong(
                f"deployment.train.zero_stage of the plan is {train.zero_stage}", f"{dep.engine} has {has}{beside}"
            )

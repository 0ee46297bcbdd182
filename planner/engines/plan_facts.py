"""A plan file that was edited by hand: its values must agree with each other and name what exists.

`planner.plan.load_plan` reads the tree and its numbers; here names and rules of models, GPUs, engines and frameworks are held against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from planner.engines.records import engine
from planner.engines.training import WRITTEN_PRECISIONS, Framework, framework
from planner.errors import PlanFileError, UnknownNameError
from planner.hardware.catalog import load_catalog
from planner.models.lookup import find
from planner.models.precision import kv_dtype, precision
from planner.plan import Deployment, Plan, TrainSettings, load_plan
from planner.plan_check import short
from planner.request import OFFLOADS

MEND = "Solve again, or mend that field."


def read_plan(path: str | Path) -> Plan:
    """The plan of a file, checked. Raises what load_plan raises, PlanFileError and UnknownNameError for what cannot be."""
    plan = load_plan(path)
    check_plan(plan)
    return plan


def check_plan(plan: Plan) -> None:
    """Raises PlanFileError (what, why, next step) or UnknownNameError (nearest names) for the first value that cannot be."""
    _check_model(plan)
    dep = plan.deployment
    if dep is None:
        return
    _check_gpus(plan, dep)
    if dep.train is not None:
        _check_training(plan, dep, dep.train)
    else:
        _check_serving(plan, dep)


def wrong(what: str, why: str, next_step: str = MEND) -> PlanFileError:
    """An error in the words of a plan file."""
    return PlanFileError(what, why, next_step)


def _known(field: str, value: Any, names: Iterable[str]) -> None:
    """UnknownNameError, with the nearest names, for a value that is none of them."""
    if value not in (pool := tuple(names)):
        raise UnknownNameError(f"{field} of the plan", str(value), pool, MEND)


def _check_model(plan: Plan) -> None:
    """request.model is the plan's model, as far as the registry knows both."""
    asked = plan.request.get("model")
    if asked is None or (isinstance(asked, str) and Path(asked).expanduser().exists()):
        return
    if not isinstance(asked, str):
        raise wrong(f"request.model of the plan is {short(asked)}", "it must be a name or a path")
    here, there = find(asked), find(plan.model.hf_id)
    if here is not None and there is not None and here[0]["id"] != there[0]["id"]:
        raise wrong(
            f"request.model of the plan is {short(asked)}, its model is {plan.model.hf_id}",
            "the numbers of the plan are of the second",
            "Solve again, or mend request.model.",
        )


def _check_gpus(plan: Plan, dep: Deployment) -> None:
    """GPUs of the offers exist in the catalog of the plan. Left out where a folder of --catalog is gone: it may have held them."""
    hardware = plan.request.get("hardware")
    folders = (hardware.get("catalog_dirs") if isinstance(hardware, dict) else None) or ()
    if not isinstance(folders, list | tuple) or not all(isinstance(f, str) and Path(f).is_dir() for f in folders):
        return
    catalog = load_catalog(tuple(folders))
    for offer in dep.offers:
        if offer.gpu not in catalog.gpus:
            raise UnknownNameError(
                "GPU of the plan", offer.gpu, catalog.gpus, "Solve again, or mend deployment.offers."
            )


def _check_serving(plan: Plan, dep: Deployment) -> None:
    try:
        engine(dep.engine)
        precision(dep.precision)
        kv_dtype(dep.kv_cache_dtype)
    except UnknownNameError as error:
        raise UnknownNameError(f"{error.kind} of the plan", error.name, error.suggestions, MEND) from None
    serve = dep.serve
    if serve is not None and 0 < plan.model.max_context < serve.max_model_len:
        raise wrong(
            f"deployment.serve.max_model_len of the plan is {serve.max_model_len}",
            f"{plan.model.name} reads at most {plan.model.max_context} tokens",
        )


def _check_training(plan: Plan, dep: Deployment, train: TrainSettings) -> None:
    try:
        stack = framework(dep.engine)
    except UnknownNameError as error:
        raise UnknownNameError(f"{error.kind} of the plan", error.name, error.suggestions, MEND) from None
    _known("precision", dep.precision, dict.fromkeys((*stack.precisions, *WRITTEN_PRECISIONS)))
    _known("optimizer", train.optimizer, stack.optimizers)
    _known("method", train.method, stack.methods)
    _known("offload", train.offload, OFFLOADS)
    _check_stage(dep, train, stack)
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
            known = f"stages {', '.join(map(str, stages))}" if stages else "no ZeRO stage"
            raise wrong(
                f"deployment.train.zero_stage of the plan is {train.zero_stage}", f"{dep.engine} has {known}{beside}"
            )

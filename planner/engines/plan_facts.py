"""A plan file that was edited by hand: its values must agree with each other and name what exists.

`planner.plan.load_plan` reads the tree, its names and its numbers; here models, machines, engines and frameworks are held against it
(plan_serving.py, plan_training.py).
"""

from __future__ import annotations

from pathlib import Path

from planner.engines.plan_serving import check_serving
from planner.engines.plan_training import check_training
from planner.engines.plan_words import wrong
from planner.errors import UnknownNameError
from planner.hardware.catalog import load_catalog
from planner.hardware.records import Catalog, Gpu
from planner.models.limits import expert_parallel_problem, pipeline_parallel_problem, tensor_parallel_problem
from planner.models.load import load_model
from planner.models.lookup import find
from planner.plan import Deployment, OfferChoice, Plan, load_plan
from planner.plan_check import short


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
    gpus = _check_machines(plan, dep)
    if dep.train is not None:
        check_training(plan, dep, dep.train, gpus)
    elif dep.serve is not None:
        check_serving(plan, dep, dep.serve, gpus)
    _check_degrees(plan, dep)


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


def _check_machines(plan: Plan, dep: Deployment) -> tuple[Gpu, ...]:
    """GPUs and machines of the offers exist in the catalog of the plan; the GPUs. Left out, with no GPUs, where a folder of --catalog is
    gone: it may have held them."""
    kinds = sorted({offer.gpu for offer in dep.offers})
    if len(kinds) > 1:
        raise wrong(f"deployment.offers of the plan mix {' and '.join(kinds)}", "a plan runs on one kind of GPU")
    hardware = plan.request.get("hardware")
    folders = (hardware.get("catalog_dirs") if isinstance(hardware, dict) else None) or ()
    if not isinstance(folders, list | tuple) or not all(isinstance(f, str) and Path(f).is_dir() for f in folders):
        return ()
    catalog = load_catalog(tuple(folders))
    for offer in dep.offers:
        if offer.gpu not in catalog.gpus:
            raise UnknownNameError(
                "GPU of the plan", offer.gpu, catalog.gpus, "Solve again, or mend deployment.offers."
            )
        _check_instance(offer, catalog)
    return tuple(catalog.gpus[name] for name in kinds)


def _check_instance(offer: OfferChoice, catalog: Catalog) -> None:
    """A machine type that the catalog knows has the GPUs that the offer says."""
    known = {
        (i.gpu.name, i.gpu_count)
        for i in catalog.instances
        if (i.provider, i.name) == (offer.provider, offer.instance_type)
    }
    if known and (offer.gpu, offer.gpus_per_instance) not in known:
        have = " or ".join(f"{count}x {gpu}" for gpu, count in sorted(known))
        raise wrong(
            f"deployment.offers of the plan say that {offer.provider} {short(offer.instance_type)} has {offer.gpus_per_instance}x {offer.gpu}",
            f"it has {have}",
        )  # fmt: skip


def _check_degrees(plan: Plan, dep: Deployment) -> None:
    """Tensor, pipeline and expert parallelism are degrees that the model has, where the registry knows it."""
    if find(plan.model.hf_id) is None:
        return
    model = load_model(plan.model.hf_id, offline=True)
    for name, rule in (
        ("tensor_parallel", tensor_parallel_problem),
        ("pipeline_parallel", pipeline_parallel_problem),
        ("expert_parallel", expert_parallel_problem),
    ):
        reason = rule(model, getattr(dep, name))
        if reason is not None:
            raise wrong(f"deployment.{name} of the plan is {getattr(dep, name)}", reason)

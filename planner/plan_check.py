"""Numbers of a plan that was read back: none that no plan can hold."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from planner.errors import PlanFileError

MAY_BE_NEGATIVE = ("headroom_gib",)
MOST = {"count": 100_000, "gpus": 1_000_000, "gpus_per_instance": 10_000}
LARGEST = 1e18
WIDEST = 120
MOST_VALUES = 1_000_000
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 2  # YAML aliases nest without end
_BRIEF.maxstring = _BRIEF.maxother = WIDEST


def short(value: Any) -> str:
    """A value as an error message shows it: at most WIDEST characters, whatever it holds."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"a whole number of {value.bit_length()} bits"  # Python refuses to write the longest
    text = repr(value[:WIDEST]) if isinstance(value, str) else _BRIEF.repr(value)
    return cut(text)


def cut(text: str) -> str:
    """Text of at most WIDEST characters."""
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def check_size(tree: Any) -> None:
    """Raises PlanFileError for a tree of more than MOST_VALUES, or without end: YAML aliases make one of a few lines."""
    try:
        most = values_of(tree, {})
    except RecursionError:
        most = math.inf
    if most > MOST_VALUES:
        raise PlanFileError(
            "this is larger than any plan", f"over {MOST_VALUES:,} values, counted with its YAML aliases",
            "Give a plan.yaml that `planner solve --out DIR` wrote.",
        )  # fmt: skip


def values_of(tree: Any, known: dict[int, float]) -> float:
    """Values of a tree written out, each shared part counted once and added as often as it is used; infinite where it holds itself."""
    parts = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    if id(tree) not in known:
        known[id(tree)] = math.inf if parts else 1  # while its parts are counted
        known[id(tree)] = 1 + sum(values_of(part, known) for part in parts)
    return known[id(tree)]


def numbers(tree: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a tree of dicts and lists, with its path."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from numbers(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for position, value in enumerate(tree):
            yield from numbers(value, f"{path}.{position}")
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield path, float(tree)


def check_layout(tree: Mapping[str, Any]) -> None:
    """Raises PlanFileError where the deployment contradicts itself: settings of its task, GPUs of its axes and machines, batch, layers."""
    found = tree.get("deployment")
    if found is None:
        if tree.get("status") != "infeasible":
            raise _wrong(f"the plan is {tree.get('status')} and has no deployment", "only an infeasible plan has none")
        return
    own, other = ("serve", "train") if tree.get("task") == "serve" else ("train", "serve")
    if found.get(own) is None or found.get(other) is not None:
        absent = own if found.get(own) is None else other
        state = "null" if absent == own else "set"
        raise _wrong(f"deployment.{absent} of the plan is {state}", f"its task is {tree.get('task')!r}")
    _check_axes(found)
    if found.get("train") is not None:
        _check_batch(found, tree)


def _check_axes(found: Mapping[str, Any]) -> None:
    """Every axis at least 1; their product is the GPUs in use, which the machines hold."""
    axes = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")
    for name in (*axes, "expert_parallel", "gpus"):
        if found[name] < 1:
            raise _wrong(f"deployment.{name} of the plan is {found[name]}", "it must be 1 or more")
    product = math.prod(found[name] for name in axes)
    if product != found["gpus"]:
        terms = " x ".join(f"{name} {found[name]}" for name in axes if found[name] > 1 or name in axes[::3])
        raise _wrong(f"deployment.gpus of the plan is {found['gpus']}", f"{terms} makes {product}")
    rented = sum(offer["count"] * offer["gpus_per_instance"] for offer in found["offers"])
    if rented < found["gpus"]:
        raise _wrong(f"deployment.offers of the plan hold {rented} GPUs", f"deployment.gpus is {found['gpus']}")
    _check_machines(found)


def machines_in_use(per_machine: int, per_replica: int, replicas: int) -> int:
    """Machines that replicas take: as many to a machine as it holds whole, or each over several machines."""
    over = -(-per_replica // per_machine)
    return replicas * over if over > 1 else -(-replicas // (per_machine // per_replica))


def _check_machines(found: Mapping[str, Any]) -> None:
    """As many machines as the deployment takes: no fewer, and none that would stand idle and be paid."""
    per_machine = min(offer["gpus_per_instance"] for offer in found["offers"])
    if per_machine < 1:
        raise _wrong(f"deployment.offers.gpus_per_instance of the plan is {per_machine}", "it must be 1 or more")
    replicas = found["data_parallel"] if found.get("serve") is not None else 1
    per_replica = found["gpus"] // replicas
    needed, taken = machines_in_use(per_machine, per_replica, replicas), sum(o["count"] for o in found["offers"])
    if needed != taken:
        what = (
            f"{replicas} replica{'s' if replicas > 1 else ''} of {per_replica} GPUs"
            if found.get("serve")
            else f"{found['gpus']} GPUs"
        )
        raise _wrong(
            f"deployment.offers of the plan take {taken} machines", f"{what} need {needed} of {per_machine} GPUs"
        )


def _check_batch(found: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
    """micro-batch x accumulation x data-parallel ranks is the global batch; layers of the stages are those of the model."""
    train = found["train"]
    for name in ("micro_batch_size", "gradient_accumulation_steps", "seq_len", "steps"):
        if train[name] < 1:
            raise _wrong(f"deployment.train.{name} of the plan is {train[name]}", "it must be 1 or more")
    batch = train["micro_batch_size"] * train["gradient_accumulation_steps"] * found["data_parallel"]
    if batch != train["global_batch_size"]:
        raise _wrong(
            f"deployment.train.global_batch_size of the plan is {train['global_batch_size']}",
            f"micro_batch_size x gradient_accumulation_steps x data_parallel makes {batch}",
        )
    stages, layers = train.get("layers_per_stage"), tree["model"]["layers"]
    if stages and (len(stages) != found["pipeline_parallel"] or sum(stages) != layers):
        raise _wrong(
            f"deployment.train.layers_per_stage of the plan holds {sum(stages)} layers in {len(stages)} stages",
            f"the model has {layers}, pipeline_parallel is {found['pipeline_parallel']}",
        )


def _wrong(what: str, why: str) -> PlanFileError:
    return PlanFileError(what, why, "Solve again, or mend that field.")


def check_numbers(tree: Mapping[str, Any]) -> None:
    """Raises PlanFileError for the first number of deployment, memory, predictions or cost that is not finite, negative, beyond any machine,
    or a range that does not hold its value."""
    parts = {name: tree.get(name) for name in ("deployment", "memory", "predicted", "cost")}
    for path, value in numbers(parts):
        name = path.rsplit(".", 1)[-1]
        most = MOST.get(name, LARGEST)
        if not math.isfinite(value) or value > most or (value < 0 and name not in MAY_BE_NEGATIVE):
            raise PlanFileError(
                f"{cut(path)} of the plan is {value:g}",
                f"it must be a number from 0 to {most:g}" if name not in MAY_BE_NEGATIVE else "it must be finite",
                "Solve again, or mend that field.",
            )
    for name, found in (parts["predicted"] or {}).items():
        low, value, high = found["low"], found["value"], found["high"]
        slack = 1e-6 * max(abs(value), 1e-6)
        if not low - slack <= value <= high + slack:
            raise PlanFileError(
                f"predicted.{cut(name)} of the plan is {value:g}, outside its own range {low:g} .. {high:g}",
                "",
                "Solve again, or mend that field.",
            )

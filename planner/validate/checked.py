"""`planner solve --validate dry`: the best answer that the dry run accepts; refused ones are named in the plan.

An answer is refused when its counted memory is above what the GPU has, or when its model cannot be built as planned. One that
the dry run does not count yet is kept, with a warning: that says nothing against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.engines.training import framework
from planner.errors import InvalidValueError, ModelConfigError, NoPlanError
from planner.plan import Deployment, MemoryUse, Plan
from planner.validate.dry import DryRun, dry_run

MOST_TRIES = 5
BROKEN = (ArithmeticError, RuntimeError, ValueError, LookupError, TypeError)
Solve = Callable[[Sequence[Deployment]], Plan]


def checked(solve: Solve, tell: Callable[[str, float, float | None], None]) -> Plan:
    """Solve, count the answer, and solve again without it while it is refused. NoPlanError after MOST_TRIES refusals."""
    refused: list[tuple[Deployment, str]] = []
    while len(refused) < MOST_TRIES:
        plan = solve([d for d, _ in refused])
        plan = replace(plan, assumptions=(*plan.assumptions, *(said(d, why) for d, why in refused)))
        if plan.deployment is None:
            return plan
        tell(f"counting answer {len(refused) + 1} on fake tensors", 0, None)
        try:
            found = dry_run(plan)
        except (InvalidValueError, ModelConfigError) as error:
            return replace(plan, warnings=(*plan.warnings, f"Not checked by the dry run: {error}"))
        except BROKEN as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
            refused.append((plan.deployment, f"its model cannot be built as planned ({reason})"))
            continue
        why = over(plan.deployment, plan.memory, found) if plan.memory is not None else ""
        if not why:
            return replace(plan, validation=found.validation())
        refused.append((plan.deployment, why))
    raise NoPlanError(
        f"the dry run refused the {MOST_TRIES} best answers", said(*refused[-1]), "Plan without --validate and look with `planner validate`."
    )  # fmt: skip


def said(d: Deployment, why: str) -> str:
    """A refused answer in one sentence."""
    where = f"{d.offers[0].count} x {d.offers[0].instance_type}" if d.offers else "no machine"
    size = f"micro-batch {d.train.micro_batch_size}, ZeRO {d.train.zero_stage}" if d.train else f"{d.precision} weights"
    axes = f"TP {d.tensor_parallel}, PP {d.pipeline_parallel}, DP {d.data_parallel}"
    return f"The check on fake tensors refused a better answer ({d.engine} on {where}, {axes}, {size}): {why}."


def counted_total_gib(d: Deployment, memory: MemoryUse, found: DryRun) -> float:
    """The planned total with its counted parts put in place of the planned ones.

    training: total + (1 + fragmentation) (counted - planned tensors at the peak); serving: total + counted - planned weights and KV cache
    (activations of the engine's own kernels are not counted).
    """
    parts = {p.name: p.counted - p.predicted for p in found.parts if p.unit == "GiB"}
    if d.train is not None:
        return memory.total_gib + (1 + framework(d.engine).number("fragmentation")) * parts.get(
            "tensors at the peak", 0.0
        )
    return memory.total_gib + parts.get("weights", 0.0) + parts.get("KV cache", 0.0)


def over(d: Deployment, memory: MemoryUse, found: DryRun) -> str:
    """Why the counted memory does not fit; '' when it does."""
    total = counted_total_gib(d, memory, found)
    if total <= memory.gpu_usable_gib:
        return ""
    return f"it counts {total:.2f} GiB where {memory.gpu_usable_gib:.2f} GiB may be used"

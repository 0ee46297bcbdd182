"""Which (tensor_parallel, pipeline_parallel) a replica may take on a class of machines, and why not otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.engines.records import EngineSpec
from planner.hardware.records import Link
from planner.space.hardware_classes import HardwareClass

MAX_TENSOR_PARALLEL = 16
MAX_GPUS_PER_REPLICA = 64
PIPELINE_DEGREES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)

Rule = Callable[[int], str | None]


@dataclass(frozen=True)
class Layout:
    """A replica on a class: degrees, how many replicas share a machine or how many machines one replica spans."""

    tensor_parallel: int
    pipeline_parallel: int
    replicas_per_node: int
    nodes_per_replica: int
    tensor_link: Link | None
    pipeline_link: Link | None


def layout_problem(hw: HardwareClass, tp: int, pp: int) -> str | None:
    """Why a replica of tp x pp cannot be laid on machines of this class, in words; None when it can.

    Tensor parallelism stays inside a machine. A replica that needs more than one machine takes whole machines, with
    its stages aligned to them, and needs a known fabric between them.
    """
    per_node, gpus = hw.gpus_per_node, tp * pp
    if tp > per_node:
        return f"tensor_parallel {tp} needs {tp} GPUs in one machine, {hw.label} has {per_node}"
    if gpus <= per_node:
        return None
    if gpus > MAX_GPUS_PER_REPLICA:
        return f"{gpus} GPUs per replica is above the {MAX_GPUS_PER_REPLICA} that are searched"
    if per_node % tp or gpus % per_node:
        return f"tensor_parallel {tp} x pipeline_parallel {pp} does not fill whole machines of {per_node} GPUs"
    if hw.fabric is None:
        return f"a replica of {gpus} GPUs spans machines, and no fabric between machines of {hw.label} is known"
    if any(_limit == 1 for _limit in (o.quota for o in hw.offers)) and len(hw.offers) == 1:
        return f"a replica of {gpus} GPUs spans machines, and there is one {hw.label}"
    return None


def no_layout(hw: HardwareClass, tensor_rule: Rule, pipeline_rule: Rule) -> str:
    """Why nothing can be laid out on the class, by the smallest degrees that model and pins allow; the same words for like machines."""
    tensor = next((tp for tp in range(1, MAX_TENSOR_PARALLEL + 1) if tensor_rule(tp) is None), None)
    if tensor is not None and tensor > hw.gpus_per_node:
        return f"tensor_parallel {tensor} needs {tensor} GPUs in one machine"
    stages = next((pp for pp in PIPELINE_DEGREES if pipeline_rule(pp) is None), None)
    if tensor is None or stages is None:
        return "no legal layout on the machine"
    return f"tensor_parallel {tensor} x pipeline_parallel {stages} needs {tensor * stages} GPUs of one machine, or of whole machines whose network is known"


def layouts(hw: HardwareClass, tensor_rule: Rule, pipeline_rule: Rule) -> list[Layout]:
    """All layouts of a replica on the class that the model's own divisibility rules allow."""
    found = []
    for tp in range(1, min(hw.gpus_per_node, MAX_TENSOR_PARALLEL) + 1):
        if tensor_rule(tp) is not None:
            continue
        for pp in PIPELINE_DEGREES:
            if pipeline_rule(pp) is not None or layout_problem(hw, tp, pp) is not None:
                continue
            gpus = tp * pp
            spans = max(1, gpus // hw.gpus_per_node)
            found.append(
                Layout(
                    tp,
                    pp,
                    replicas_per_node=hw.gpus_per_node // gpus if spans == 1 else 0,
                    nodes_per_replica=spans,
                    tensor_link=hw.link if tp > 1 else None,
                    pipeline_link=None if pp == 1 else (hw.link if spans == 1 else hw.fabric),
                )
            )
    return found


def kv_heads_problem(engine: EngineSpec, tensor: int, kv_heads: int | None) -> str | None:
    """Why an engine that does not copy key/value heads cannot cut attention over so many ranks; None when it can."""
    if not engine.tensor_within_kv_heads or kv_heads is None or tensor <= kv_heads:
        return None
    return f"{engine.name} does not copy key/value heads: of {tensor} ranks those beyond {kv_heads} would hold no attention"


def engine_problem(engine: EngineSpec, layout: Layout, kv_heads: int | None = None) -> str | None:
    """Why the engine cannot run the layout, in words; None when it can. kv_heads: fewest key/value heads of a layer of the model."""
    if problem := kv_heads_problem(engine, layout.tensor_parallel, kv_heads):
        return problem
    if layout.tensor_parallel > 1 and not engine.tensor_parallel:
        return f"{engine.name} has no tensor parallelism"
    if layout.pipeline_parallel > 1 and not engine.pipeline_parallel:
        return f"{engine.name} has no pipeline parallelism"
    if layout.nodes_per_replica > 1 and engine.multi_node == "none":
        return f"{engine.name} keeps a replica inside one machine"
    return None

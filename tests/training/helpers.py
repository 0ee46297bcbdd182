"""Small builders for the training tests: models, hardware, rows."""

from __future__ import annotations

from dataclasses import replace

from planner.engines.training import stacks
from planner.estimator.memory.training import TrainMemory, training_memory
from planner.estimator.time.training import TrainTime, training_time
from planner.hardware.catalog import load_catalog
from planner.models.load import load_model
from planner.models.spec import Attention, DenseMlp, Layer, ModelSpec
from planner.request import OFFLOADS, TrainJob
from planner.space.hardware_classes import HardwareClass
from planner.space.train_rows import TrainRows

CATALOG = load_catalog()
STACKS = stacks()
NAMES = list(STACKS)
FRAMEWORKS = [STACKS[n] for n in NAMES]


def hardware(gpu: str = "a100-sxm-80", per_node: int = 8, fabric: str | None = "ib-200g") -> HardwareClass:
    g = CATALOG.gpus[gpu]
    return HardwareClass(g, per_node, CATALOG.links[g.default_link], CATALOG.links[fabric] if fabric else None, ())


def row(framework: str, *, tp=1, pp=1, cp=1, dp=1, ep=1, zero=0, mbs=1, ga=1, k=1, offload="none") -> tuple[int, ...]:
    return (NAMES.index(framework), tp, pp, cp, dp, ep, zero, mbs, ga, k, OFFLOADS.index(offload))


def gpt(hidden: int, layers: int, heads: int, vocab: int = 51200, tied: bool = True) -> ModelSpec:
    attention = Attention(heads, heads, hidden // heads, q_bias=True, kv_bias=True, o_bias=True)
    layer = Layer((attention,), DenseMlp(4 * hidden, False, True), 4 * hidden)
    return ModelSpec(f"gpt-{hidden}x{layers}", "dense", hidden, vocab, 1 << 17, (layer,) * layers, tied, 2 * hidden)


def model(name: str, **changes) -> ModelSpec:
    found = load_model(name, offline=True)
    return replace(found, **changes) if changes else found


def memory(spec: ModelSpec, job: TrainJob, hw: HardwareClass, *rows: tuple[int, ...]) -> TrainMemory:
    return training_memory(spec, job, hw, FRAMEWORKS, TrainRows.of(rows))


def step(spec: ModelSpec, job: TrainJob, hw: HardwareClass, *rows: tuple[int, ...]) -> TrainTime:
    return training_time(spec, job, hw, FRAMEWORKS, TrainRows.of(rows))

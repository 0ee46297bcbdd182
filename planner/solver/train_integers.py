"""From estimated layouts to the problem in whole numbers: one row for each layout and offer, and the limits in its units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from planner.estimator.cost.training import run_cost_usd
from planner.estimator.operating_point import IntArray
from planner.hardware.records import Offer
from planner.request import TrainRequest
from planner.solver.problem import LimitName, OfferColumn, Problem, Rows, duration_bucket
from planner.solver.train_site import Block
from planner.space.hardware_classes import HardwareClass, offer_limit
from planner.units import GIB


@dataclass(frozen=True)
class Quantised:
    """The problem, the offers of its columns, and where each row comes from: number of the block, position in it."""

    problem: Problem
    offers: tuple[Offer, ...]
    block_of: IntArray
    position: IntArray


def quantise(request: TrainRequest, classes: Sequence[HardwareClass], blocks: Sequence[Block]) -> Quantised:
    """Integer rows: each block once per offer of its class, with the cost of the run there."""
    offers: list[Offer] = []
    columns: list[OfferColumn] = []
    places: dict[tuple[str, str], int] = {}
    of_class: dict[int, list[int]] = {}
    for h in sorted({b.hardware for b in blocks}):
        for offer in classes[h].offers:
            place = places.setdefault((offer.instance.provider, offer.price.region), len(places))
            of_class.setdefault(h, []).append(len(offers))
            columns.append(
                OfferColumn(
                    len(offers),
                    place,
                    round(offer.price.usd_per_hour * 1e6),
                    classes[h].gpus_per_node,
                    offer_limit(offer),
                )
            )
            offers.append(offer)
    parts = [_block_rows(block, o, offers[o], b) for b, block in enumerate(blocks) for o in of_class[block.hardware]]
    limits = train_limits(request)
    if not parts:
        empty = np.zeros(0, dtype=np.int64)
        rows = Rows(empty, empty, empty, empty, empty, empty, empty, empty, empty, {}, empty)
        return Quantised(Problem(request.goal, rows, (), limits), (), empty, empty)
    rows = _concatenate([p[0] for p in parts])
    return Quantised(
        Problem(request.goal, rows, tuple(columns), limits),
        tuple(offers),
        np.concatenate([p[1] for p in parts]),
        np.concatenate([np.arange(len(p[0])) for p in parts]),
    )


def _block_rows(block: Block, o: int, offer: Offer, number: int) -> tuple[Rows, IntArray]:
    n = len(block)
    duration = np.ceil(block.run_s * 1e6).astype(np.int64)
    ones = np.ones(n, dtype=np.int64)
    ram = offer.host_ram_gib
    host = np.zeros(n) if ram is None else (block.memory.host_ram_bytes - ram * GIB) / 1024
    rows = Rows(
        hardware=o * ones,
        replicas=ones,
        replicas_max=ones,
        replicas_per_node=0 * ones,
        nodes_per_replica=block.machines * ones,
        gpus_per_replica=block.rows.world,
        duration_us=duration,
        duration_bucket=duration_bucket(duration),
        tokens_milli_per_s=np.floor(block.time.tokens_per_s * 1e3).astype(np.int64),
        metrics={
            "vram": np.ceil((block.memory.peak_bytes - block.memory.usable_bytes) / 1024).astype(np.int64),
            "host_ram": np.ceil(host).astype(np.int64),
            "step_time": np.ceil(block.time.step_time_s * 1e6).astype(np.int64),
            "deadline": duration,
        },
        run_cost=np.ceil(run_cost_usd(duration / 1e6, block.machines * offer.price.usd_per_hour) * 1e6).astype(
            np.int64
        ),
    )
    return rows, number * ones


def _concatenate(parts: list[Rows]) -> Rows:
    arrays = {
        f.name: np.concatenate([getattr(p, f.name) for p in parts])
        for f in fields(Rows)
        if f.name not in ("metrics", "run_cost")
    }
    costs = [p.run_cost for p in parts if p.run_cost is not None]
    return Rows(
        **arrays,
        metrics={k: np.concatenate([p.metrics[k] for p in parts]) for k in parts[0].metrics},
        run_cost=np.concatenate(costs),
    )


def train_limits(request: TrainRequest) -> dict[LimitName, int]:
    """The limits in the solver's units. GPU and host memory are always limits: nothing may be missing."""
    limits = request.limits
    values: dict[LimitName, float | None] = {
        "vram": 0.0,
        "host_ram": 0.0,
        "step_time": None if limits.step_s is None else limits.step_s * 1e6,
        "deadline": None if limits.deadline_s is None else limits.deadline_s * 1e6,
        "budget": None if limits.budget_usd is None else limits.budget_usd * 1e6,
        "budget_per_hour": None if limits.budget_usd_per_hour is None else limits.budget_usd_per_hour * 1e6,
        "max_gpus": limits.max_gpus,
    }
    return {name: int(np.floor(value + 1e-6)) for name, value in values.items() if value is not None}

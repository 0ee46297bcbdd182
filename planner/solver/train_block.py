"""The layouts of one class of hardware and one machine count: estimated, their layers cut into stages, the useful ones kept."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np

from planner.engines.training import Framework
from planner.estimator.operating_point import BoolArray, FloatArray, concatenate, take
from planner.estimator.time.training import layer_and_head_s
from planner.solver.exclude import REFUSED, training_rows_ruled_out
from planner.solver.train_site import LONGEST_S, Block, Site, misses, useful, useful_rows
from planner.solver.train_splits import longest_stage, worth_trying
from planner.space.train_candidates import enumerate_rows
from planner.space.train_rows import Split, TrainRows

CHUNK = 32
NEAR_MISS = 1.25
NOT_IN_TIME = "hardware not estimated before the time limit"
ENDLESS = "a run of over ten years"
SPLITS_LATE = "layouts whose stages were not balanced before the time limit"


def estimate_block(site: Site, pruned: Counter[str]) -> tuple[Block | None, int]:
    """Memory of all rows, time of those that nearly fit, better splits where they help; the rows that are worth keeping.

    Also how many candidates that were.
    """
    rows, illegal = enumerate_rows(site.model, site.request.job, site.hw, site.machines, site.stacks, site.request.pins)
    pruned["illegal layout"] += illegal
    refused = training_rows_ruled_out(site.hw.gpu.name, site.stacks, rows, site.excluded)
    pruned[REFUSED] += int(refused.sum())
    illegal, rows = illegal + int(refused.sum()), rows.take(~refused)
    if not len(rows):
        return None, illegal
    memory = site.memory(rows)
    most = site.near_miss * memory.usable_bytes
    near = memory.peak_bytes <= most
    loose = np.flatnonzero(_splits_freely(site, rows))
    least = site.memory(rows.take(loose), "floor")
    reach = max(NEAR_MISS * float(memory.usable_bytes[0]), float(memory.peak_bytes.min()))
    hopeful = least.peak_bytes <= np.minimum(most[loose], reach)
    lost = ~near
    lost[loose] &= ~hopeful
    pruned[f"needs more than {site.near_miss:g} times the memory"] += int(lost.sum())
    if lost.all():
        return None, illegal + len(rows)
    kept = np.flatnonzero(near)
    block = site.timed(rows.take(kept), take(memory, kept))
    floor = site.timed(rows.take(loose[hopeful]), take(least, np.flatnonzero(hopeful)), "floor")
    block, tried = balance_stages(site, block, floor, pruned)
    endless = block.run_s > LONGEST_S
    pruned[ENDLESS] += int(endless.sum())
    block = block.take(~endless)
    if not len(block):
        return None, illegal + len(rows) + tried
    front = useful_rows(site, block)
    pruned["dominated by a better layout of the same machines"] += len(block) - len(front)
    return block.take(front), illegal + len(rows) + tried


def _splits_freely(site: Site, rows: TrainRows) -> BoolArray:
    """Rows with a choice of how many layers each stage gets."""
    uneven = np.array([s.uneven_stages for s in site.stacks])[rows.framework]
    stages = rows.pipeline_parallel
    return np.asarray(uneven & (rows.split == 0) & (stages > 1) & (stages < len(site.model.layers)))


def balance_stages(site: Site, block: Block, floor: Block, pruned: Counter[str]) -> tuple[Block, int]:
    """The block with other splits of those layouts that could beat its rows, and how many splits that were.

    floor: layouts at a bound of every split. One is passed over when its bound is above what is worth seeking, or a row of
    its framework is no slower than its bound and breaks no limit by more than its bound does: no split of it could be kept.
    """
    order = np.argsort(floor.run_s, kind="stable")
    worth = (site.goal_value(floor.run_s) <= site.worth) & ~_far_off(site, floor)
    worth = worth[order]
    pruned["layouts that no split of the layers makes better than others"] += int((~worth).sum())
    floor, parts, tried, size = floor.take(order[worth]), [block], 0, CHUNK
    rivals = _rivals(site, block)
    while True:
        promising = ~_beaten(site, floor, rivals)
        pruned["layouts that no split of the layers makes better than others"] += int((~promising).sum())
        floor = floor.take(promising)
        if not len(floor):
            break
        if time.perf_counter() > site.ends:
            pruned[SPLITS_LATE] += len(floor)
            break
        chunk, floor = floor.take(np.arange(len(floor)) < size), floor.take(np.arange(len(floor)) >= size)
        rows = with_splits(site, chunk.rows)
        memory = site.memory(rows)
        near = np.flatnonzero(memory.peak_bytes <= site.near_miss * memory.usable_bytes)
        tried += len(rows)
        pruned["splits of the layers that need too much memory"] += len(rows) - len(near)
        parts.append(site.timed(rows.take(near), take(memory, near)))
        rivals = np.concatenate([rivals, _rivals(site, parts[-1])])
    return _join(parts), tried


def _far_off(site: Site, floor: Block) -> BoolArray:
    """Rows whose bound misses a limit on time or on the run's cost by more than near misses do."""
    limits, far = site.request.limits, np.zeros(len(floor), dtype=bool)
    for value, limit in ((floor.run_s, limits.deadline_s), (floor.time.step_time_s, limits.step_s)):
        if limit is not None:
            far |= value > site.near_miss * limit
    return far


def _join(parts: list[Block]) -> Block:
    if len(parts) == 1:
        return parts[0]
    return Block(
        parts[0].hardware,
        parts[0].machines,
        TrainRows.join([p.rows for p in parts]),
        concatenate([p.memory for p in parts]),
        concatenate([p.time for p in parts]),
        np.concatenate([p.run_s for p in parts]),
    )


def _rivals(site: Site, block: Block) -> FloatArray:
    """Rows that others may be beaten by, (F, 5): framework, run, misses of each limit."""
    over, found = misses(site, block), []
    for number in np.unique(block.rows.framework):
        mine = np.flatnonzero(block.rows.framework == number)
        found.append(mine[useful(block.run_s[mine], over[:, mine], block.rows.framework[mine])])
    at = np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
    return np.column_stack([block.rows.framework[at], block.run_s[at], over[:, at].T])


def _beaten(site: Site, floor: Block, rivals: FloatArray) -> BoolArray:
    """Rows at their bound that a rival of the same framework is no worse than in run and misses."""
    points = np.column_stack([floor.rows.framework, floor.run_s, misses(site, floor).T])
    beaten = np.zeros(len(floor), dtype=bool)
    for rival in rivals:
        beaten |= (points[:, 0] == rival[0]) & (points[:, 1:] >= rival[1:]).all(1)
    return beaten


def with_splits(site: Site, rows: TrainRows) -> TrainRows:
    """Each row once for every split of its layers that is worth an estimate."""
    found: list[TrainRows] = []
    for stages in np.unique(rows.pipeline_parallel).tolist():
        for number in np.unique(rows.framework).tolist():
            mine = rows.take((rows.pipeline_parallel == stages) & (rows.framework == number))
            if len(mine):
                found.append(_with_splits(site, mine, stages, site.stacks[number]))
    return TrainRows.join(found)


def _with_splits(site: Site, rows: TrainRows, stages: int, framework: Framework) -> TrainRows:
    longest = longest_stage(len(site.model.layers), stages)
    pieces = tuple((stage, n) for stage in range(stages) for n in range(1, longest + 1))
    count = len(rows)
    spread = rows.take(np.repeat(np.arange(count), len(pieces)))
    spread = spread.cut(pieces, np.tile(np.arange(len(pieces)), count))
    table = site.memory(spread, "piece").peak_bytes.reshape(count, stages, longest)
    layer_s, head_s = layer_and_head_s(site.model, site.request.job, site.hw, framework, rows)
    numbers: dict[Split, int] = {}
    origin, index = [], []
    for i in range(count):
        for sizes in worth_trying(site.model, table[i], float(layer_s[i]), float(head_s[i])).tolist():
            origin.append(i)
            index.append(numbers.setdefault(tuple(sizes), len(numbers)))
    return rows.take(np.array(origin, dtype=np.int64)).cut(tuple(numbers), np.array(index, dtype=np.int64))

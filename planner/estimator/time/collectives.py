"""Time of collectives by message size, ranks and link: latency floor, protocol switch, bandwidth ramp, shared paths.

    t = floor + per_rank (n - 2) + handshake V / (V + V0) + V / (bandwidth * efficiency * share(n))

with V the bytes each rank puts on the wire (equation of each collective below) and the constants by link kind in
collectives.yaml. Checked there against aiconfigurator-core's measured all-reduces and published NCCL bus bandwidths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.estimator.time.surfaces import FloatArray, read_data
from planner.hardware.records import Link
from planner.units import GB


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = read_data("planner.estimator.time", "collectives.yaml")
    return data


@dataclass(frozen=True)
class Fabric:
    """Columns (S, 1) of S groups: ranks, seconds of latency, handshake, bytes/s each rank gets. One rank costs nothing.

    all_reduce, reduce_scatter: measured time over the ring's (1 where nobody measured it).
    """

    ranks: FloatArray
    latency_s: FloatArray
    handshake_s: FloatArray
    handshake_bytes: FloatArray
    bytes_per_s: FloatArray
    all_reduce: FloatArray
    reduce_scatter: FloatArray


def _one(link: Link | None, ranks: int) -> tuple[float, float, float, float]:
    """Latency, handshake seconds, handshake bytes, bytes/s of one group."""
    if link is None or link.kind == "none" or ranks <= 1:
        return 0.0, 0.0, 1.0, np.inf
    kind, bandwidth, busbw = link.kind, link.bandwidth_gb_per_s, link.measured_busbw_gb_per_s
    if kind == "nvlink-bridge" and ranks > 2:
        beyond = _data()["bridge_beyond_island"]
        kind, bandwidth, busbw = beyond["kind"], beyond["bandwidth_gb_per_s"], None
    row = _data()["kinds"][kind]
    if kind == "xgmi-mesh" and link.max_gpus > 1:  # every peer has its own wire: n ranks use n-1 of them
        bandwidth = bandwidth * (ranks - 1) / (link.max_gpus - 1)
        busbw = busbw * (ranks - 1) / (link.max_gpus - 1) if busbw else None
    share = min(1.0, (row["knee"] / ranks) ** row["exponent"])
    rate = (busbw or bandwidth * row["efficiency"]) * share
    latency = (max(row["floor_us"], link.latency_us) + row["per_rank_us"] * max(0, ranks - 2)) * 1e-6
    return latency, row["handshake_us"] * 1e-6, float(row["handshake_bytes"]), rate * GB


def fabric(links: Sequence[Link | None], ranks: Sequence[int]) -> Fabric:
    """The columns of S groups from their links and sizes."""
    known: dict[tuple[Link | None, int], tuple[float, float, float, float]] = {}
    rows = []
    for link, count in zip(links, ranks, strict=True):
        if (link, count) not in known:
            known[link, count] = _one(link, count)
        rows.append(known[link, count])
    table = np.array(rows, dtype=float)
    factors = np.array([(link.all_reduce_factor, link.reduce_scatter_factor) if link else (1.0, 1.0) for link in links])
    columns = (table[:, :1], table[:, 1:2], table[:, 2:3], table[:, 3:4], factors[:, :1], factors[:, 1:])
    return Fabric(np.array(ranks, dtype=float)[:, None], *columns)


def _wire_s(group: Fabric, wire_bytes: FloatArray) -> FloatArray:
    """Seconds for `wire_bytes` (S, G) put on the wire by each rank; 0 for groups of one."""
    time = (
        group.latency_s
        + group.handshake_s * wire_bytes / (wire_bytes + group.handshake_bytes)
        + wire_bytes / group.bytes_per_s
    )
    return np.asarray(np.where(group.ranks > 1, time, 0.0))


def all_reduce_s(group: Fabric, message_bytes: npt.ArrayLike) -> FloatArray:
    """V = 2 (n-1)/n message."""
    return _wire_s(group, 2 * (group.ranks - 1) / group.ranks * np.asarray(message_bytes)) * group.all_reduce


def all_gather_s(group: Fabric, message_bytes: npt.ArrayLike) -> FloatArray:
    """V = (n-1)/n message, the message being what every rank ends up with."""
    return _wire_s(group, (group.ranks - 1) / group.ranks * np.asarray(message_bytes))


def reduce_scatter_s(group: Fabric, message_bytes: npt.ArrayLike) -> FloatArray:
    """V = (n-1)/n message, the message being what every rank starts with."""
    return all_gather_s(group, message_bytes) * group.reduce_scatter


def all_to_all_s(group: Fabric, message_bytes: npt.ArrayLike) -> FloatArray:
    """V = (n-1)/n message, the message being what a rank sends in all."""
    return all_gather_s(group, message_bytes)


def p2p_s(group: Fabric, message_bytes: npt.ArrayLike) -> FloatArray:
    """V = message, from one neighbour to the next."""
    return _wire_s(group, np.asarray(message_bytes, dtype=float))

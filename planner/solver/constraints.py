"""The mathematical programme: variables, and one function per family of constraints, each with its inequality.

Sets: rows r (configurations), offers o, hardware classes h, places p.
Variables: x_r in {0,1} row chosen; R_r replicas run with row r (0 when not chosen); n_o machines taken of offer o;
y_p in {0,1} place used.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import lcm
from typing import Any

import numpy as np

from planner.solver.problem import ROW_LIMITS, UNBOUNDED, LimitName, OfferColumn, Problem, excess


@dataclass
class Programme:
    """The CP-SAT model under construction, with its variables and the names of the constraints put in."""

    model: Any
    problem: Problem
    x: list[Any]
    replicas: list[Any]
    machines: list[Any]
    bounds: list[int]
    ceilings: list[int]
    places: dict[int, Any]
    constraints: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, constraint: Any, name: str) -> None:
        """Post a constraint under a name."""
        self.model.add(constraint).with_name(name)
        self.constraints += 1
        self.named.append(name)


def hourly_budget(problem: Problem, enforced: frozenset[LimitName]) -> int | None:
    """The least of the hourly budgets that are enforced, in micro-USD; None when there is none."""
    names: list[LimitName] = ["budget_per_hour"] if problem.rows.run_cost is not None else ["budget", "budget_per_hour"]
    found = [problem.limits[n] for n in names if n in enforced and n in problem.limits]
    return min(found) if found else None


def most_machines(problem: Problem, hardware: int, enforced: frozenset[LimitName]) -> int:
    """The most machines of a class that quotas, budget and max_gpus allow in any one place (cheapest offers first).

    A valid bound for every answer: an answer stands in one place, and taking cheaper machines first never allows fewer.
    """
    places: dict[int, list[OfferColumn]] = defaultdict(list)
    for offer in problem.offers:
        if offer.hardware == hardware:
            places[offer.place].append(offer)
    best = 0
    for offers in places.values():
        money = hourly_budget(problem, enforced)
        gpus = problem.limits.get("max_gpus") if "max_gpus" in enforced else None
        count = 0
        for offer in sorted(offers, key=lambda o: o.micro_usd_per_hour):
            take = UNBOUNDED if offer.limit is None or "quota" not in enforced else offer.limit
            if money is not None and offer.micro_usd_per_hour:
                take = min(take, money // offer.micro_usd_per_hour)
                money -= take * offer.micro_usd_per_hour
            if gpus is not None:
                take = min(take, gpus // offer.gpus)
                gpus -= take * offer.gpus
            count += take
        best = max(best, count)
    return min(best, UNBOUNDED)


def replica_ceilings(problem: Problem, enforced: frozenset[LimitName]) -> list[int]:
    """replicas_max of each row, cut to what the machines of its class can hold (0 when not even its fewest fit)."""
    rows = problem.rows
    ceiling = {int(h): most_machines(problem, int(h), enforced) for h in set(rows.hardware.tolist())}
    found = []
    for h, low, high, per, nodes in zip(
        *(
            c.tolist()
            for c in (rows.hardware, rows.replicas, rows.replicas_max, rows.replicas_per_node, rows.nodes_per_replica)
        ),
        strict=True,
    ):
        room = ceiling[h] * per if per >= 1 else ceiling[h] // nodes
        found.append(min(high, room) if low != high else high)
        if room < low:
            found[-1] = 0 if low != high else high
    return found


def define_variables(problem: Problem, enforced: frozenset[LimitName]) -> Programme:
    """x_r, R_r, n_o, y_p with their bounds. A quota is the upper bound of n_o when 'quota' is enforced."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    rows = problem.rows
    x = [model.new_bool_var(f"x{r}") for r in range(len(rows))]
    ceilings = replica_ceilings(problem, enforced)
    needed: dict[int, int] = defaultdict(int)
    for h, m in zip(rows.hardware.tolist(), rows.machines(np.array(ceilings, dtype=np.int64)).tolist(), strict=True):
        needed[h] = max(needed[h], m)
    replicas = []
    for r, (low, high, cut) in enumerate(
        zip(rows.replicas.tolist(), rows.replicas_max.tolist(), ceilings, strict=True)
    ):
        replicas.append(low * x[r] if low == high else model.new_int_var(0, cut, f"R{r}"))
    machines, bounds = [], []
    for o, offer in enumerate(problem.offers):
        bound = needed[offer.hardware]
        if "quota" in enforced and offer.limit is not None:
            bound = min(bound, offer.limit)
        bounds.append(bound)
        machines.append(model.new_int_var(0, bound, f"n{o}"))
    places = {p: model.new_bool_var(f"y{p}") for p in sorted({offer.place for offer in problem.offers})}
    return Programme(model, problem, x, replicas, machines, bounds, ceilings, places)


def one_configuration(p: Programme) -> None:
    """sum_r x_r = 1: one configuration for all replicas."""
    p.model.add_exactly_one(p.x)
    p.constraints += 1
    p.named.append("one_configuration")


def replica_bounds(p: Programme) -> None:
    """replicas_r x_r <= R_r <= ceiling_r x_r for rows whose number of replicas is free."""
    rows = p.problem.rows
    for r, (low, high) in enumerate(zip(rows.replicas.tolist(), rows.replicas_max.tolist(), strict=True)):
        if low != high:
            p.add(p.replicas[r] <= p.ceilings[r] * p.x[r], f"replicas_max[{r}]")
            p.add(p.replicas[r] >= low * p.x[r], f"replicas_min[{r}]")


def enough_machines(p: Programme) -> None:
    """For every class h: sum_{r in h} R_r c_r <= L sum_{o in h} n_o.

    c_r / L is the share of a machine that one replica takes: 1 / replicas_per_node, or nodes_per_replica when it
    spans machines; L is the least common multiple that makes all shares whole.
    """
    rows = p.problem.rows
    by_class: dict[int, list[int]] = defaultdict(list)
    for r, h in enumerate(rows.hardware.tolist()):
        by_class[h].append(r)
    offers: dict[int, list[int]] = defaultdict(list)
    for o, offer in enumerate(p.problem.offers):
        offers[offer.hardware].append(o)
    per_node, spans = rows.replicas_per_node.tolist(), rows.nodes_per_replica.tolist()
    for h, members in by_class.items():
        unit = lcm(*(per_node[r] for r in members if per_node[r] >= 1)) if any(per_node[r] >= 1 for r in members) else 1
        share = {r: unit // per_node[r] if per_node[r] >= 1 else unit * spans[r] for r in members}
        need = sum(share[r] * p.replicas[r] for r in members)
        p.add(need <= unit * sum(p.machines[o] for o in offers[h]), f"machines[{h}]")


def one_place(p: Programme) -> None:
    """sum_p y_p = 1 and n_o <= bound_o y_place(o): all machines stand in one place of one provider."""
    p.model.add_exactly_one(list(p.places.values()))
    p.constraints += 1
    p.named.append("one_place")
    for o, offer in enumerate(p.problem.offers):
        p.add(p.machines[o] <= p.bounds[o] * p.places[offer.place], f"place[{o}]")


def _row_metric(p: Programme, values: list[int]) -> Any:
    return sum(v * x for v, x in zip(values, p.x, strict=True) if v)


def limit_row(p: Programme, name: LimitName) -> None:
    """sum_r excess_{name,r} x_r <= 0: the chosen row breaks the limit `name` by nothing.

    Families: VRAM, host RAM, TTFT, TPOT, E2E, step time, deadline, accuracy loss.
    """
    over = excess(p.problem.rows, p.problem.limits)[name].tolist()
    if any(over):
        p.add(_row_metric(p, over) <= 0, name)


def limit_budget(p: Programme) -> None:
    """cost <= budget: hourly for serving, of the whole run for training."""
    p.add(total_cost(p) <= p.problem.limits["budget"], "budget")


def limit_rate(p: Programme) -> None:
    """sum_o price_o n_o <= budget_per_hour."""
    p.add(hourly_cost(p) <= p.problem.limits["budget_per_hour"], "budget_per_hour")


def limit_gpus(p: Programme) -> None:
    """sum_o gpus_o n_o <= max_gpus: GPUs of all machines taken, used or not."""
    p.add(total_gpus(p) <= p.problem.limits["max_gpus"], "max_gpus")


def limit_throughput(p: Programme) -> None:
    """sum_r tokens_r R_r >= min_throughput."""
    p.add(total_tokens(p) >= p.problem.limits["min_throughput"], "min_throughput")


def hourly_cost(p: Programme) -> Any:
    """Micro-USD per hour of all machines."""
    return sum(offer.micro_usd_per_hour * n for offer, n in zip(p.problem.offers, p.machines, strict=True))


def total_cost(p: Programme) -> Any:
    """What `cheapest` minimises: micro-USD of the run of the chosen row where rows have one, else per hour."""
    if p.problem.rows.run_cost is not None:
        return _row_metric(p, p.problem.rows.run_cost.tolist())
    return hourly_cost(p)


def total_gpus(p: Programme) -> Any:
    """GPUs of all machines."""
    return sum(offer.gpus * n for offer, n in zip(p.problem.offers, p.machines, strict=True))


def total_tokens(p: Programme) -> Any:
    """Milli-tokens per second of all replicas."""
    return sum(t * r for t, r in zip(p.problem.rows.tokens_milli_per_s.tolist(), p.replicas, strict=True))


def duration(p: Programme) -> Any:
    """Duration of the chosen row in microseconds (E2E, or the run)."""
    return _row_metric(p, p.problem.rows.duration_us.tolist())


def duration_step(p: Programme) -> Any:
    """Duration of the chosen row in steps of TIE_PERCENT."""
    return _row_metric(p, p.problem.rows.duration_bucket.tolist())


def tighten_throughput(p: Programme) -> None:
    """sum_r tokens_r R_r <= sum_r tokens_r ceiling_r x_r: implied, and gives the search its bound."""
    tokens = p.problem.rows.tokens_milli_per_s.tolist()
    if p.problem.goal == "throughput":
        p.add(
            total_tokens(p) <= _row_metric(p, [t * c for t, c in zip(tokens, p.ceilings, strict=True)]),
            "throughput_ceiling",
        )


def fix_throughput(p: Programme, value: int) -> None:
    """x_r = 0 for rows that cannot give exactly `value` milli-tokens/s: implied once throughput is fixed at its optimum."""
    rows = p.problem.rows
    for x, tokens, low, high in zip(
        p.x, rows.tokens_milli_per_s.tolist(), rows.replicas.tolist(), p.ceilings, strict=True
    ):
        if tokens <= 0 or value % tokens or not low <= value // tokens <= high:
            p.model.add(x == 0)


def build(problem: Problem, enforced: frozenset[LimitName]) -> Programme:
    """The whole programme with the limits named in `enforced`."""
    p = define_variables(problem, enforced)
    one_configuration(p)
    replica_bounds(p)
    enough_machines(p)
    one_place(p)
    tighten_throughput(p)
    families = {
        "budget": limit_budget,
        "budget_per_hour": limit_rate,
        "max_gpus": limit_gpus,
        "min_throughput": limit_throughput,
    }
    for name in problem.limits:
        if name not in enforced:
            continue
        if name in ROW_LIMITS:
            limit_row(p, name)
        else:
            families[name](p)
    return p

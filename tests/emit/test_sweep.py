"""A hundred random legal plans: every file of every plan parses."""

from __future__ import annotations

import random
from pathlib import Path

from planner.emit import render
from planner.engines.records import EngineSpec, engines
from planner.plan import Plan
from tests.emit.plans import MODELS, offer, owned, plan
from tests.emit.test_files import check_all

MACHINES = [
    ("h100-sxm", 8),
    ("a100-sxm-80", 8),
    ("l4", 1),
    ("l40s", 4),
    ("h200", 8),
    ("b200", 8),
    ("t4", 4),
    ("mi300x", 8),
]


ANY = ("fp8", "fp8-block", "int8-w8a8", "int4-awq", "int4-gptq", "bnb-int8", "bnb-nf4", "mxfp4", "nvfp4")


def random_plan(rng: random.Random) -> Plan:
    spec: EngineSpec = rng.choice(list(engines().values()))
    gpu, per = rng.choice([m for m in MACHINES if m[0] != "mi300x" or "amd" in spec.vendors])
    precision = rng.choice(spec.precisions)
    limit = precision.max_tensor_parallel or 8
    tp = rng.choice([n for n in (1, 2, 4, 8) if n <= min(per, limit)])
    pp = rng.choice([1, 2, 4]) if spec.pipeline_parallel and tp == per else 1
    dp = rng.choice([1, 2, 3])
    nodes = max(1, -(-tp * pp // per))
    machines = dp * nodes if nodes > 1 else -(-dp // max(1, per // (tp * pp)))
    model = rng.choice(list(MODELS))
    moe = MODELS[model].moe and spec.expert_parallel
    groups = (
        rng.choice([g for g in (1, 2, 4) if tp % g == 0])
        if moe and spec.name in ("vllm", "sglang") and nodes == 1
        else 1
    )
    seen = (
        owned(gpu, per, machines)
        if rng.random() < 0.3
        else offer(
            gpu,
            per,
            machines,
            provider=rng.choice(["aws", "gcp", "azure", "lambda", "runpod", "nebius", "coreweave"]),
            tier=rng.choice(["on_demand", "spot", "reserved"]),
            region=rng.choice(["us-east-1", "eu-west-4", "global"]),
        )
    )
    kinds = [k for k in spec.kv_dtypes if k not in ("bf16", "fp16") or precision.precision in (k, *ANY)]
    return plan(
        model,
        spec.name,
        precision.precision,
        rng.choice(kinds),
        tp,
        pp,
        dp,
        tp if moe and rng.random() < 0.5 else 1,
        groups,
        (seen,),
        seqs=rng.choice([1, 8, 256]),
        share=rng.choice([None, 0.85]),
        length=rng.choice([2048, 131072]),
    )


def test_a_hundred_random_plans(tmp_path: Path) -> None:
    rng, seen = random.Random(7), set()
    for index in range(100):
        made = random_plan(rng)
        check_all(made, tmp_path / str(index))
        dep = made.deployment
        assert dep is not None
        seen.add((dep.engine, dep.nodes_per_replica > 1, dep.data_parallel > 1))
        assert render(made) == render(made)
    assert {name for name, _, _ in seen} == set(engines())
    assert any(several for _, several, _ in seen)

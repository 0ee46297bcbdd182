"""The estimate and the count agree: quick plans by default, all of tests/validate/dry_plans.yaml with `pytest -m slow`."""

import importlib.util
from pathlib import Path

import pytest
import yaml

from planner.cli.main import run
from planner.plan import load_plan
from planner.validate.dry import TOLERANCE_PERCENT, dry_run

PLANS = yaml.safe_load((Path(__file__).parent / "dry_plans.yaml").read_text("utf-8"))["plans"]
needs_torch = pytest.mark.skipif(
    not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")),
    reason="torch and transformers are the extra 'profile'",
)


def marked(plan):
    return pytest.param(plan["words"].split(), id=plan["name"], marks=[] if plan.get("quick") else pytest.mark.slow)


@needs_torch
@pytest.mark.parametrize("words", [marked(p) for p in PLANS])
def test_predicted_is_counted(words, tmp_path):
    assert run(["solve", *words, "--out", str(tmp_path / "plan")]) == 0
    found = dry_run(load_plan(tmp_path / "plan" / "plan.yaml"))
    assert not found.beyond, {p.name: (p.predicted, p.counted) for p in found.parts if p.name in found.beyond}
    assert TOLERANCE_PERCENT == 5


def test_the_plans_are_of_many_kinds():
    """Dense, grouped heads and experts; tensor, FSDP, ZeRO 0 to 3; checkpoints every 0, 1, 2, 4 layers."""
    texts = [p["words"] for p in PLANS]
    assert len(texts) >= 30
    for part in ("fsdp2", "deepspeed", "ddp", "mixtral", "qwen3-30b", "Llama-2-7b", "--tp 4", "--pp 4", "lora",
                 *(f"--zero-stage {s}" for s in range(4)), *(f"--checkpoint-interval {k}" for k in (0, 1, 2, 4))):  # fmt: skip
        assert any(part.lower() in t.lower() for t in texts), part

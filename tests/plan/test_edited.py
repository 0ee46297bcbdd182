"""Plan files edited by hand: each contradiction is one line that says what, why and the next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.cli.main import run
from planner.engines.plan_facts import check_plan, read_plan
from planner.errors import PlanFileError, UnknownNameError
from planner.plan import load_plan, plan_from_dict

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SERVE, TRAIN, PIPELINE = "main-job", "train-8b", "train-70b-rented"


def tree(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / name / "plan.yaml").read_text("utf-8"))


def edited(tmp_path: Path, name: str, **changes: Any) -> Path:
    """The example with values put at dotted paths ('deployment.train.zero_stage': 9)."""
    found = tree(name)
    for path, value in changes.items():
        *parents, last = path.split(".")
        place: Any = found
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        place[last] = value
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(found), encoding="utf-8")
    return file


CASES = [
    (TRAIN, {"deployment.train.zero_stage": 9}, "zero_stage of the plan is 9: .* has stages"),
    (TRAIN, {"deployment.train.zero_stage": 1}, "zero_stage of the plan is 1"),
    (TRAIN, {"deployment.train.optimizer": "adamv"}, "unknown optimizer of the plan 'adamv'. Nearest known: adamw"),
    (TRAIN, {"deployment.train.offload": "optimiser"}, "unknown offload of the plan .* Nearest known: optimizer"),
    (TRAIN, {"deployment.train.offload": "optimizer+parameters", "deployment.train.zero_stage": 1}, "zero_stage"),
    (TRAIN, {"deployment.engine": "fsdp3"}, "unknown .*'fsdp3'. Nearest known: fsdp2"),
    (TRAIN, {"deployment.precision": "bf17"}, "unknown precision of the plan 'bf17'. Nearest known: bf16"),
    (TRAIN, {"deployment.train.seq_len": 1_000_000}, "seq_len of the plan is 1000000: .* reads at most 131072 tokens"),
    (TRAIN, {"deployment.train.seq_len": 0}, "seq_len of the plan is 0"),
    (TRAIN, {"deployment.train.checkpoint_interval": 999}, "checkpoint_interval of the plan is 999: .* layers"),
    (TRAIN, {"deployment.train.micro_batch_size": 7}, "global_batch_size .* makes"),
    (TRAIN, {"deployment.train": None}, "deployment.train of the plan is null: its task is 'train'"),
    (TRAIN, {"deployment.train.layers_per_stage": [1, 2]}, "layers_per_stage .* 3 layers in 2 stages"),
    (SERVE, {"deployment.serve": None}, "deployment.serve of the plan is null: its task is 'serve'"),
    (SERVE, {"task": "train"}, "deployment.train of the plan is null"),
    (SERVE, {"deployment.serve.max_model_len": 10_000_000}, "max_model_len .* reads at most 131072 tokens"),
    (SERVE, {"deployment.offers.0.gpu": "h100-sxn"}, "unknown GPU of the plan 'h100-sxn'. Nearest known: h100-sxm"),
    (SERVE, {"deployment.tensor_parallel": 16}, "deployment.gpus of the plan is .*tensor_parallel 16.* makes"),
    (SERVE, {"deployment.data_parallel": 0}, "data_parallel of the plan is 0: it must be 1 or more"),
    (SERVE, {"deployment.expert_parallel": 0}, "expert_parallel of the plan is 0"),
    (SERVE, {"deployment.offers.0.count": 0}, "offers of the plan hold 0 GPUs"),
    (SERVE, {"deployment.engine": "vlm"}, "unknown .*'vlm'. Nearest known: vllm"),
    (SERVE, {"deployment.precision": "fp9"}, "unknown precision of the plan 'fp9'. Nearest known: fp8"),
    (SERVE, {"deployment.kv_cache_dtype": "fp9"}, "unknown .* of the plan 'fp9'"),
    (SERVE, {"request.model": "llama-3.2-1b"}, "request.model of the plan is 'llama-3.2-1b', its model is"),
    (SERVE, {"request.model": 7}, "request.model of the plan is 7"),
    (SERVE, {"deployment": None}, "has no deployment"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "said"), CASES, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_a_contradiction_is_one_line(tmp_path, name, changes, said):
    with pytest.raises((PlanFileError, UnknownNameError), match=said) as caught:
        read_plan(edited(tmp_path, name, **changes))
    assert "Solve again" in str(caught.value)


@pytest.mark.parametrize(
    "command", [["emit"], ["validate"], ["validate", "--level", "device"], ["validate", "--level", "engine"]]
)
@pytest.mark.parametrize(
    ("name", "changes"),
    [(TRAIN, {"deployment.train.zero_stage": 9}), (SERVE, {"deployment.offers.0.gpu": "h100-sxn"}), (SERVE, {"deployment.serve": None})],
)  # fmt: skip
def test_commands_say_it_and_exit_with_2(tmp_path, monkeypatch, capsys, command, name, changes):
    file = edited(tmp_path, name, **changes)
    monkeypatch.chdir(tmp_path)
    assert run([command[0], str(file), *command[1:]]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "of the plan" in said.err
    assert [p.name for p in tmp_path.iterdir()] == ["plan.yaml"], "nothing is written"


@pytest.mark.parametrize("name", sorted(p.parent.name for p in EXAMPLES.glob("*/plan.yaml")))
def test_what_the_solver_writes_passes(name):
    read_plan(EXAMPLES / name / "plan.yaml")


def test_a_folder_of_own_prices_that_is_gone_does_not_stop_a_plan(tmp_path):
    changes = {"request.hardware.catalog_dirs": [str(tmp_path / "gone")], "deployment.offers.0.gpu": "my-own-card"}
    assert read_plan(edited(tmp_path, SERVE, **changes)).deployment.offers[0].gpu == "my-own-card"


def test_a_local_config_stays_the_model_of_its_plan(tmp_path):
    (tmp_path / "llama-3.2-1b").write_text("{}")
    read_plan(edited(tmp_path, SERVE, **{"request.model": str(tmp_path / "llama-3.2-1b")}))


def test_an_infeasible_plan_needs_no_deployment():
    found = tree(SERVE) | {"status": "infeasible", "deployment": None, "memory": None, "cost": None, "predicted": {}}
    check_plan(plan_from_dict(found))


def test_plans_read_by_the_library_are_checked_for_layout_alone(tmp_path):
    """Calibration reads plans of machines that the catalog may not have any more."""
    load_plan(edited(tmp_path, SERVE, **{"deployment.offers.0.gpu": "h100-sxn"}))
    with pytest.raises(PlanFileError, match="makes"):
        load_plan(edited(tmp_path, SERVE, **{"deployment.tensor_parallel": 16}))

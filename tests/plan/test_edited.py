"""Plan files edited by hand: each contradiction is one line that says what, why and the next step."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.cli.main import run
from planner.engines.plan_facts import check_plan, read_plan
from planner.engines.plan_serving import check_serving
from planner.errors import InvalidValueError, PlanFileError, UnknownNameError
from planner.estimator.corrections import records_of
from planner.plan import load_plan, plan_from_dict, plan_to_json
from planner.plan_seal import as_solved, was_edited
from tests.emit.plans import plan

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
    (TRAIN, {"deployment.train.zero_stage": 2}, "zero_stage of the plan is 2"),
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
    (SERVE, {"deployment.offers.0.count": 3}, "offers of the plan take 3 machines: 1 replica of 1 GPUs need 1 of 1 GPUs"),
    (SERVE, {"deployment.tensor_parallel": 2, "deployment.gpus": 2}, "offers of the plan hold 1 GPUs: deployment.gpus is 2"),
    (SERVE, {"deployment.tensor_parallel": 2, "deployment.gpus": 2, "deployment.offers.0.gpus_per_instance": 2},
     "runpod .* has 2x b200: it has 1x b200"),
    (SERVE, {"deployment.data_parallel": 4, "deployment.gpus": 4}, "offers of the plan hold 1 GPUs"),
    (SERVE, {"deployment.tensor_parallel": 3, "deployment.gpus": 3, "deployment.offers.0.count": 3}, "tensor_parallel of the plan is 3: 64 attention heads"),
    (PIPELINE, {"deployment.offers.0.count": 99}, "take 99 machines"),
    (SERVE, {"deployment.serve.max_model_len": 100}, "max_model_len of the plan is 100: a request of its load has 1280 tokens"),
    (SERVE, {"memory.kv_cache_tokens": 1000}, "max_model_len of the plan is 4096: its cache .* holds 1000 tokens, less than one such request"),
    (SERVE, {"deployment.serve.max_model_len": 131072, "memory.kv_cache_tokens": 100000}, "holds 100000 tokens"),
    (SERVE, {"deployment.serve.max_num_batched_tokens": 1}, "max_num_batched_tokens of the plan is 1: a step of max_num_seqs"),
    (SERVE, {"deployment.precision": "nvfp4"}, "precision of the plan is nvfp4: deployment.checkpoint, .*FP8.*, holds fp8 weights"),
    (SERVE, {"deployment.precision": "int4-gptq"}, "precision of the plan is int4-gptq: tensorrt_llm runs bf16"),
    (SERVE, {"deployment.checkpoint": "nvidia/Llama-3.1-8B-Instruct-FP8"}, "checkpoint .* was made from .*3.1-8B.*, not from .*3.3-70B"),
    (SERVE, {"deployment.checkpoint": "somebody/Llama-3.3-70B-Instruct-AWQ"}, "holds int4-awq weights"),
    (SERVE, {"deployment.kv_cache_dtype": "int8"}, "kv_cache_dtype of the plan is int8: on b200 tensorrt_llm keeps"),
    (SERVE, {"deployment.context_parallel": 2, "deployment.gpus": 2, "deployment.offers.0.count": 2}, "context_parallel of the plan is 2: it is 1 in serving"),
    (SERVE, {"deployment.expert_parallel": 2}, "expert_parallel of the plan is 2: it is 1, or tensor_parallel"),
    ("moe-deepseek", {"deployment.precision": "bf16", "deployment.checkpoint": None}, "precision of the plan is bf16: .* is published in fp8-block"),
    (SERVE, {"deployment.serve.max_num_seq": 8}, "unknown field in deployment.serve of the plan 'max_num_seq'. Nearest known: max_num_seqs"),
    (SERVE, {"deploymnet": {}}, "unknown field of the plan 'deploymnet'. Nearest known: deployment"),
    (SERVE, {"deployment.offers.0.gpus_per_instanse": 1}, "in deployment.offers.0 .*Nearest known: gpus_per_instance"),
    (SERVE, {"predicted.tpot_ms.vallue": 1}, "in predicted.tpot_ms .*Nearest known: value"),
    (SERVE, {"alternatives.0.deployment.tensor_paralel": 1}, "in alternatives.0.deployment .*tensor_parallel"),
    (SERVE, {"request.workload.rate_per_sec": 1}, "in request.workload .*Nearest known: rate_per_s"),
    (TRAIN, {"request.job.token": 1}, "in request.job .*Nearest known: tokens"),
    (TRAIN, {"deployment.train.gradient_accumulation_steps": 1}, "global_batch_size .* makes"),
    (TRAIN, {"deployment.train.lora_rank": 16}, "lora_rank of the plan is 16: the method is full"),
    ("train-70b-qlora-two-24gb", {"deployment.train.frozen_precision": None}, "frozen_precision of the plan is null: qlora"),
    ("train-70b-qlora-two-24gb", {"deployment.train.lora_rank": None}, "lora_rank of the plan is None: qlora needs a rank"),
    ("train-70b-qlora-two-24gb", {"deployment.precision": "fp8", "deployment.offers.0.gpu": "a100-sxm-80"}, "precision of the plan is fp8: a100-sxm-80 computes in bf16, fp16"),
    (SERVE, {"deployment.engine": "vllm"}, "engine_version of the plan is 1.2.1: that is the version of tensorrt_llm; vllm is known as"),
    (TRAIN, {"deployment.engine": "deepspeed"}, "engine_version of the plan is .* that is the version of megatron_bridge"),
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
    assert "olve again" in str(caught.value)


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


def test_a_slip_is_said_before_the_field_that_is_missing_for_it(tmp_path):
    found = tree(SERVE)
    found["deployment"]["serve"]["max_num_seq"] = found["deployment"]["serve"].pop("max_num_seqs")
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(found), encoding="utf-8")
    with pytest.raises(PlanFileError, match=r"'max_num_seq'\. Nearest known: max_num_seqs"):
        load_plan(file)


EDITS = [
    (SERVE, {"deployment.serve.max_num_seqs": 8}),
    (SERVE, {"deployment.kv_cache_dtype": "bf16"}),
    (SERVE, {"request.workload.rate_per_s": 7.0}),
    (SERVE, {"predicted.tpot_ms": {"value": 1.0, "low": 1.0, "high": 1.0}}),
    (TRAIN, {"deployment.train.steps": 9}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), EDITS)
def test_notes_claim_no_figures_of_another_deployment(tmp_path, capsys, name, changes):
    """LAUNCH.md of an edited plan says that nothing was predicted for it; so does every later emit of the plan.yaml beside it."""
    file = edited(tmp_path, name, **changes)
    for out in (tmp_path / "once", tmp_path / "twice"):
        assert run(["emit", str(file), "--out", str(out)]) == 0
        assert "edited after it was solved" in capsys.readouterr().err
        notes = (out / "LAUNCH.md").read_text("utf-8")
        assert "| predicted | not for this deployment" in notes
        assert not any(f"| {figure} |" in notes for figure in ("ttft_ms", "tpot_ms", "step_time_s", "cost"))
        file = out / "plan.yaml"


@pytest.mark.parametrize("name", [SERVE, TRAIN])
def test_notes_of_a_plan_as_solved_have_its_figures(tmp_path, capsys, name):
    found = load_plan(EXAMPLES / name / "plan.yaml")
    assert as_solved(found)
    assert as_solved(plan_from_dict(json.loads(plan_to_json(found)))), "the form of the file does not count"
    assert not was_edited(replace(found, provenance=replace(found.provenance, figures_of=""))), (
        "not known is not edited"
    )
    assert run(["emit", str(EXAMPLES / name / "plan.yaml"), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err == ""
    notes = (tmp_path / "out/LAUNCH.md").read_text("utf-8")
    assert next(iter(found.predicted)) in notes
    assert "not for this deployment" not in notes


def test_an_edited_plan_corrects_no_predictions(tmp_path):
    changes = {"deployment.train.steps": 9, "validation": {"level": "engine", "measured": {"step_time_s": 1.0}}}
    with pytest.raises(InvalidValueError, match="edited after it was solved"):
        records_of(load_plan(edited(tmp_path, TRAIN, **changes)), "plan.yaml")


def test_limits_may_be_edited_without_touching_the_figures(tmp_path):
    assert as_solved(load_plan(edited(tmp_path, SERVE, **{"request.limits.ttft_s": 0.5})))


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


@pytest.mark.parametrize(("engine", "refused"), [("tgi", True), ("vllm", False)])
def test_a_step_shorter_than_the_longest_prompt_is_refused_where_prompts_are_whole(engine, refused):
    made = plan("8b", engine, tokens=4095, length=4096)
    dep = made.deployment
    with (
        pytest.raises(PlanFileError, match="is 4095: a step of tgi holds a whole prompt") if refused else nullcontext()
    ):
        check_serving(made, dep, dep.serve, ())

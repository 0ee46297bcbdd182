"""What the training files say, without any framework installed."""

from __future__ import annotations

import json
import os
import random
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.emit import HEADER, render, write_files
from planner.emit.train.layout import layout_of
from planner.errors import InvalidValueError, NoPlanError, PlanFileError
from planner.plan import Deployment, Plan, TrainSettings, load_plan, plan_to_yaml
from tests.train_emit.plans import VERSIONS, offer, owned, plan, random_plan, tiny

KEYS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "data/keys.yaml").read_text())


def words(name: str, part: str = "keys") -> set[str]:
    return set(KEYS[name][part].split())


def check_keys(texts: dict[str, str]) -> None:
    """Keys that the frameworks' own parsers would let pass are known ones."""
    if "ds_config.json" in texts:
        config = json.loads(texts["ds_config.json"])
        assert set(config) <= words("deepspeed_top")
        assert set(config.get("pipeline", {})) <= words("deepspeed_pipeline")
        if "optimizer" in config:
            assert set(config["optimizer"]) == {"type", "params"}
            assert set(config["optimizer"]["params"]) <= words("deepspeed_optimizer", config["optimizer"]["type"])
    if "accelerate.yaml" in texts:
        tree = yaml.safe_load(texts["accelerate.yaml"])
        assert set(tree) <= words("accelerate_top")
        assert set(tree.get("fsdp_config", {})) <= words("accelerate_fsdp")
        assert set(tree.get("parallelism_config", {})) <= words("accelerate_parallelism")
    settings = json.loads(texts["train_settings.json"])
    for part, values in settings.get("titan", {}).items():
        assert set(values) <= words("torchtitan", part)
    for part, values in settings.get("megatron", {}).items():
        assert set(values) <= words("megatron", part)
    if "megatron" in settings:
        assert settings["megatron_precision"] in words("megatron", "precision")


def check_numbers(made: Plan, texts: dict[str, str]) -> None:
    """The numbers of the plan arrive unchanged."""
    dep = made.deployment
    assert dep is not None
    train = dep.train
    assert train is not None
    settings = json.loads(texts["train_settings.json"])
    for name in (
        "micro_batch_size",
        "gradient_accumulation_steps",
        "global_batch_size",
        "checkpoint_interval",
        "seq_len",
        "steps",
        "packing",
        "chunked_loss",
    ):
        assert settings[name] == getattr(train, name), name
    assert settings["world_size"] == dep.gpus
    if "ds_config.json" in texts:
        check_deepspeed(dep, train, json.loads(texts["ds_config.json"]))
    if "accelerate.yaml" in texts:
        check_accelerate(dep, train, yaml.safe_load(texts["accelerate.yaml"]))
    if "titan" in settings:
        check_titan(made, dep, train, settings["titan"])


def check_deepspeed(dep: Deployment, train: TrainSettings, config: dict[str, Any]) -> None:
    """The batch, the stage, what is offloaded."""
    rows = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * dep.data_parallel
    assert config["train_batch_size"] == rows == train.global_batch_size
    assert config["zero_optimization"]["stage"] == train.zero_stage
    assert config.get("bf16", {}).get("enabled", False) == (dep.precision == "bf16")
    assert config.get("fp16", {}).get("loss_scale", -1) == (0 if dep.precision == "fp16" else -1)
    places = [
        config["zero_optimization"].get(f"offload_{part}", {}).get("device", "none") for part in ("optimizer", "param")
    ]
    assert (
        places
        == {"none": ["none", "none"], "optimizer": ["cpu", "none"], "optimizer+parameters": ["cpu", "cpu"]}[
            train.offload
        ]
    )
    assert config.get("tensor_parallel", {}).get("autotp_size", 1) == dep.tensor_parallel


def check_accelerate(dep: Deployment, train: TrainSettings, tree: dict[str, Any]) -> None:
    """The processes and how FSDP shards."""
    assert tree["num_processes"] == dep.gpus
    assert tree["distributed_type"] == ("FSDP" if train.zero_stage else "MULTI_GPU")
    if train.zero_stage:
        assert tree["fsdp_config"]["fsdp_reshard_after_forward"] == (train.zero_stage == 3)
        assert tree["fsdp_config"]["fsdp_activation_checkpointing"] == (train.checkpoint_interval == 1)


def check_titan(made: Plan, dep: Deployment, train: TrainSettings, titan: dict[str, Any]) -> None:
    """The degrees, the batch of a pipeline, the layers of its stages."""
    sizes = titan["parallelism"]
    ranks = (
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "context_parallel_degree",
        "data_parallel_shard_degree",
        "data_parallel_replicate_degree",
    )
    product = 1
    for name in ranks:
        product *= sizes[name]
    assert product == dep.gpus
    local = titan["training"]["local_batch_size"]
    assert local == train.micro_batch_size * (train.gradient_accumulation_steps if dep.pipeline_parallel > 1 else 1)
    if "module_fqns_per_model_part" in sizes:
        parts = sizes["module_fqns_per_model_part"]
        assert [len([n for n in p if n.startswith("layers.")]) for p in parts] == list(train.layers_per_stage or ())
        assert [n for p in parts for n in p] == [
            "tok_embeddings",
            *[f"layers.{i}" for i in range(made.model.layers)],
            "norm",
            "lm_head",
        ]


@pytest.mark.parametrize("seed", range(60))
def test_random_plans_say_what_was_planned_in_known_words(seed: int) -> None:
    made = random_plan(random.Random(seed))
    texts = render(made)
    check_keys(texts)
    check_numbers(made, texts)
    assert all(HEADER in text[:4000] for text in texts.values())
    for name, text in texts.items():
        if name.endswith(".py"):
            compile(text, name, "exec")
        if name.endswith((".sh", ".slurm")):
            assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False).stderr == ""
        if name.endswith(".yaml"):
            assert all(isinstance(d, dict) for d in yaml.safe_load_all(text))


def test_the_random_plans_reach_every_corner() -> None:
    seen: dict[str, set[Any]] = {}
    for seed in range(200):
        dep = random_plan(random.Random(seed)).deployment
        assert dep is not None
        assert dep.train is not None
        for name, value in (
            ("engine", dep.engine),
            ("stage", (dep.engine, dep.train.zero_stage)),
            ("offload", (dep.engine, dep.train.offload)),
            ("method", dep.train.method),
        ):
            seen.setdefault(name, set()).add(value)
    assert seen["engine"] == set(VERSIONS)
    assert {("deepspeed", s) for s in range(4)} | {("fsdp2", s) for s in (0, 2, 3)} <= seen["stage"]
    assert ("deepspeed", "optimizer+parameters") in seen["offload"]
    assert seen["method"] == {"full", "lora", "qlora"}


def test_a_typo_would_be_seen() -> None:
    texts = dict(render(plan()))
    texts["ds_config.json"] = json.dumps(json.loads(texts["ds_config.json"]) | {"gradient_cliping": 1.0})
    with pytest.raises(AssertionError):
        check_keys(texts)
    texts = dict(render(plan(engine="fsdp2")))
    texts["accelerate.yaml"] = texts["accelerate.yaml"].replace("fsdp_offload_params", "fsdp_ofload_params")
    with pytest.raises(AssertionError):
        check_keys(texts)


def test_the_plan_file_alone_is_enough(tmp_path: Path) -> None:
    made = plan("70b", dp=16)
    path = tmp_path / "plan.yaml"
    path.write_text(plan_to_yaml(made))
    assert render(load_plan(path)) == render(made)


def test_files_are_written_whole_and_foreign_ones_kept(tmp_path: Path) -> None:
    made = plan()
    written = write_files(made, tmp_path)
    assert {p.name for p in written} == {*render(made), "plan.yaml"} == {p.name for p in tmp_path.iterdir()}
    assert os.access(tmp_path / "launch.sh", os.X_OK)
    write_files(made, tmp_path)
    (tmp_path / "train.py").write_text("mine\n")
    with pytest.raises(InvalidValueError, match="was not written by planner"):
        write_files(made, tmp_path)
    assert (tmp_path / "train.py").read_text() == "mine\n"
    only = tmp_path / "slurm"
    assert {p.name for p in write_files(made, only, targets=("slurm",))} >= {"train.slurm", "launch.sh", "train.py"}
    with pytest.raises(InvalidValueError, match="this is a training plan"):
        write_files(made, only, targets=("serve",))


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("PipelineModule refuses ZeRO 2 and 3", {"pp": 2, "zero_stage": 2}),
    ("PipelineModule and AutoTP", {"pp": 2, "tp": 2, "zero_stage": 1}),
    ("pipeline script trains all weights", {"pp": 2, "zero_stage": 1, "method": "lora"}),
    ("parameters leave the GPU only with ZeRO 3", {"zero_stage": 2, "offload": "optimizer+parameters"}),
    ("offload needs ZeRO", {"zero_stage": 0, "offload": "optimizer"}),
    ("its CPU optimizer is AdamW", {"zero_stage": 2, "offload": "optimizer", "optimizer": "adamw-8bit"}),
    ("bf16, fp16 or fp32", {"precision": "fp8"}),
    ("context or expert", {"cp": 2}),
    ("FSDP2 shards gradients too", {"engine": "fsdp2", "zero_stage": 1}),
    ("bf16, fp16 or fp32", {"engine": "fsdp2", "precision": "fp8"}),
    ("mix 16 or 8 bit", {"engine": "megatron_bridge", "precision": "fp32"}),
    ("does not shard 4-bit", {"method": "qlora", "zero_stage": 3}),
    ("bf16 states need bf16", {"engine": "fsdp2", "optimizer": "adamw-bf16", "precision": "fp16"}),
    ("cannot resume", {"engine": "fsdp2", "tp": 2}),
    ("context parallelism needs FSDP2", {"engine": "fsdp2", "cp": 2, "zero_stage": 0}),
    ("chunked loss cuts", {"engine": "fsdp2", "cp": 2, "chunked_loss": True}),
    ("8 parts must divide", {"engine": "fsdp2", "cp": 4, "seq_len": 4100}),
    ("states and parameters together", {"engine": "fsdp2", "offload": "optimizer"}),
    ("no pipeline or expert", {"engine": "fsdp2", "pp": 2}),
    ("every layer or none", {"engine": "torchtitan", "checkpoint_interval": 2}),
    ("no loss scaling", {"engine": "torchtitan", "precision": "fp16"}),
    ("trains all weights", {"engine": "torchtitan", "method": "qlora"}),
    ("its states stay on the GPU", {"engine": "megatron_bridge", "offload": "optimizer+parameters"}),
]


@pytest.mark.parametrize(("why", "settings"), REFUSED)
def test_what_a_framework_cannot_do_is_said(why: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match=why) as caught:
        render(plan(**settings))
    assert caught.value.next_step
    assert "\n" not in str(caught.value)


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    base = plan()
    dep = base.deployment
    assert dep is not None
    assert dep.train is not None
    broken = [
        replace(dep, train=replace(dep.train, global_batch_size=33)),
        replace(dep, gpus=7),
        replace(dep, offers=(offer(per=3, count=3),)),
        replace(dep, offers=(owned("rtx-4090", 2, 2),)),
        replace(dep, offers=()),
        replace(dep, train=replace(dep.train, layers_per_stage=(30, 2))),
        replace(dep, train=replace(dep.train, steps=0)),
        replace(dep, train=None),
    ]
    for wrong in broken:
        with pytest.raises(PlanFileError):
            render(replace(base, deployment=wrong))
    with pytest.raises(NoPlanError):
        render(replace(base, status="infeasible", deployment=None))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"zero_stage": 1}, "--zero-stage 2"),
        ({"zero_stage": 3}, "--offload optimizer "),
        ({"zero_stage": 3, "offload": "optimizer"}, "--offload optimizer+parameters"),
        ({"zero_stage": 3, "offload": "optimizer+parameters"}, "more GPUs"),
        ({"engine": "fsdp2", "zero_stage": 0}, "--zero-stage 2"),
        ({"engine": "fsdp2", "zero_stage": 3}, "--offload optimizer+parameters"),
        ({"pp": 2, "zero_stage": 1}, "more GPUs"),
        ({"method": "qlora", "zero_stage": 2}, "--framework fsdp2"),
    ],
)
def test_the_plan_after_the_next_one(settings: dict[str, Any], expected: str) -> None:
    texts = render(plan(**settings))
    assert expected in json.loads(texts["train_settings.json"])["then_try"]
    assert expected.strip() in texts["LAUNCH.md"]


def test_lora_targets() -> None:
    def targets(*names: str) -> Any:
        return json.loads(render(plan(method="lora", lora_targets=names))["train_settings.json"])["lora"]["targets"]

    assert targets("attention", "mlp") == "all-linear"
    assert targets("attention") == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert targets("query_key_value") == ["query_key_value"]


def test_clusters_start_one_launcher_a_machine() -> None:
    texts = render(plan("70b", dp=16, offers=(offer(count=2, tier="spot"),)))
    slurm = texts["train.slurm"]
    assert "#SBATCH --nodes=2" in slurm
    assert "#SBATCH --ntasks-per-node=1" in slurm
    assert "#SBATCH --gpus-per-node=8" in slurm
    sky = yaml.safe_load(texts["skypilot.yaml"])
    assert (sky["num_nodes"], sky["resources"]["accelerators"], sky["resources"]["use_spot"]) == (2, {"H100": 8}, True)
    config, job = yaml.safe_load_all(texts["kubernetes.yaml"])
    assert set(config["data"]) >= {"launch.sh", "train.py", "train_parts.py", "train_settings.json", "ds_config.json"}
    assert job["kind"] == "JobSet"
    workers = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (workers["parallelism"], workers["completions"], workers["completionMode"]) == (2, 2, "Indexed")
    pod = workers["template"]["spec"]["containers"][0]
    assert pod["resources"]["limits"] == {"nvidia.com/gpu": 8}
    env = {e["name"]: e.get("value") for e in pod["env"]}
    assert env["MASTER_ADDR"] == "train-llama-3-1-70b-workers-0-0.train-llama-3-1-70b"
    single = list(yaml.safe_load_all(render(plan())["kubernetes.yaml"]))[1]
    assert (single["kind"], single["apiVersion"]) == ("Job", "batch/v1")


def test_owned_machines_get_no_skypilot() -> None:
    texts = render(plan(offers=(owned("rtx-4090", 8),)))
    assert "skypilot.yaml" not in texts
    assert "skypilot: the machines are your own" in texts["LAUNCH.md"]


def test_what_was_never_run_is_marked() -> None:
    cases = [plan(engine="torchtitan"), plan(engine="megatron_bridge", zero_stage=1), plan(engine="fsdp2", cp=2)]
    assert all("Not run by us" in render(made)["LAUNCH.md"] for made in cases)
    assert not any("Not run by us" in render(made)["LAUNCH.md"] for made in (plan(), plan(engine="fsdp2")))
    assert "about 42 GB" in render(plan("70b", "fsdp2", method="qlora", dp=2))["LAUNCH.md"]


def test_a_checkpoint_interval_of_several_layers_is_explained() -> None:
    assert "One activation is kept every 4 layers" in render(plan(checkpoint_interval=4))["LAUNCH.md"]
    assert "is kept every" not in render(plan(checkpoint_interval=1))["LAUNCH.md"]


def test_scripts_stay_short() -> None:
    for made in (plan(), plan(engine="fsdp2"), tiny(pp=2, zero_stage=1)):
        texts = render(made)
        assert len(texts["train.py"].splitlines()) < 300
        assert len(texts["train_parts.py"].splitlines()) < 400
    assert layout_of(plan()).packages[-1].startswith("datasets")


def test_megatron_shards_its_optimizer_only_where_planned() -> None:
    """Its two switches turn each other on, and its recipe turns one on; uneven stages want whole checkpoints."""
    for stage in (0, 1):
        tree = json.loads(
            render(plan("8b", "megatron_bridge", dp=8, zero_stage=stage, precision="bf16"))["train_settings.json"]
        )
        assert tree["megatron"]["optimizer"]["use_distributed_optimizer"] == (stage > 0)
        assert tree["megatron"]["ddp"]["use_distributed_optimizer"] == (stage > 0)
    uneven = {
        "pp": 2,
        "dp": 4,
        "layers_per_stage": (15, 17),
        "checkpoint_interval": 2,
        "zero_stage": 1,
        "precision": "bf16",
    }
    with pytest.raises(InvalidValueError, match="divide the layers of every stage"):
        render(plan("8b", "megatron_bridge", **uneven))

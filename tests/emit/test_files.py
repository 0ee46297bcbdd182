"""Every emitted file parses, and says what the plan says."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.emit import HEADER, render
from planner.emit.layout import facts
from planner.engines.records import engines
from planner.plan import Plan
from tests.emit.helpers import unpack
from tests.emit.plans import GOLDEN

# Fields of LeaderWorkerSet v1: kubernetes-sigs/lws@024af08 api/leaderworkerset/v1/leaderworkerset_types.go
LWS_SCHEMA: dict[str, Any] = {
    "replicas": int,
    "startupPolicy": {"LeaderCreated", "LeaderReady"},
    "rolloutStrategy": dict,
    "networkConfig": dict,
    "leaderWorkerTemplate": {
        "size": int,
        "restartPolicy": {"RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None", "Default"},
        "leaderTemplate": {"metadata": dict, "spec": dict},
        "workerTemplate": {"metadata": dict, "spec": dict},
        "subGroupPolicy": dict,
    },
}


def against(schema: Any, value: Any, where: str = "spec") -> list[str]:
    """Faults of value: unknown fields, wrong types, values outside the enumeration."""
    if isinstance(schema, dict):
        unknown = [f"{where}.{k} is unknown" for k in value if k not in schema]
        return unknown + [fault for k in value if k in schema for fault in against(schema[k], value[k], f"{where}.{k}")]
    if isinstance(schema, set):
        return [] if value in schema else [f"{where} = {value!r}"]
    return [] if isinstance(value, schema) else [f"{where} is a {type(value).__name__}"]


def check_all(plan: Plan, folder: Path) -> dict[str, str]:
    """Parses each file of the plan with the parser of its language."""
    texts = render(plan)
    unpack(texts, folder)
    for name, text in texts.items():
        assert HEADER in text[:300], name
        assert text.endswith("\n"), name
        assert not text.endswith("\n\n"), name
        if name.endswith((".sh", ".slurm")):
            done = subprocess.run(["bash", "-n", str(folder / name)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, (name, done.stderr)
        elif name.endswith(".yaml"):
            assert all(isinstance(d, dict) for d in yaml.safe_load_all(text)), name
        elif name.endswith(".py"):
            ast.parse(text)
            assert "@@" not in text
        elif name.endswith(".conf"):
            assert text.count("{") == text.count("}") > 0
    for document in yaml.safe_load_all(texts.get("kubernetes.yaml", "")):
        if document["kind"] == "LeaderWorkerSet":
            assert against(LWS_SCHEMA, document["spec"]) == []
    return texts


@pytest.mark.parametrize("name", GOLDEN)
def test_every_file_parses(name: str, tmp_path: Path) -> None:
    check_all(GOLDEN[name], tmp_path)


def test_own_schema_sees_a_typo() -> None:
    documents = yaml.safe_load_all(render(GOLDEN["vllm-pp-two-nodes"])["kubernetes.yaml"])
    spec = next(d for d in documents if d["kind"] == "LeaderWorkerSet")["spec"]
    spec["leaderWorkerTemplate"]["restartPolicy"] = "Always"
    spec["leaderWorkerTemplate"]["siz"] = 2
    assert len(against(LWS_SCHEMA, spec)) == 2


@pytest.mark.parametrize("name", GOLDEN)
def test_gpus_and_scripts_in_kubernetes_are_those_of_the_plan(name: str) -> None:
    texts = render(GOLDEN[name])
    if "kubernetes.yaml" not in texts:
        assert name == "tensorrt-llm-two-nodes"
        return
    config, workload, service = list(yaml.safe_load_all(texts["kubernetes.yaml"]))
    dep = GOLDEN[name].deployment
    assert dep is not None
    assert config["data"] == {k: v for k, v in texts.items() if k in config["data"]}
    assert config["data"]["serve.sh"] == texts["serve.sh"]
    spec = workload["spec"]
    templates = (
        [spec["template"]] if workload["kind"] == "Deployment" else [spec["leaderWorkerTemplate"]["workerTemplate"]]
    )
    pods = spec["replicas"] * (1 if workload["kind"] == "Deployment" else spec["leaderWorkerTemplate"]["size"])
    (container,) = templates[0]["spec"]["containers"]
    assert pods * sum(container["resources"]["limits"].values()) == dep.gpus
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert service["spec"]["ports"][0]["targetPort"] in ports


@pytest.mark.parametrize("name", GOLDEN)
def test_machines_and_devices_are_those_of_the_plan(name: str) -> None:
    texts, dep = render(GOLDEN[name]), GOLDEN[name].deployment
    assert dep is not None
    if "docker-compose.yaml" in texts:
        server = yaml.safe_load(texts["docker-compose.yaml"])["services"]["server"]
        assert server["entrypoint"] == ["bash", "/launch/serve.sh"]
        if "deploy" in server:
            (device,) = server["deploy"]["resources"]["reservations"]["devices"]
            assert 0 < device["count"] <= dep.offers[0].gpus_per_instance
    nodes = int(re.search(r"#SBATCH --nodes=(\d+)", texts["serve.slurm"])[1])  # type: ignore[index]
    gpus = int(re.search(r"#SBATCH --gpus-per-node=(\d+)", texts["serve.slurm"])[1])  # type: ignore[index]
    assert dep.gpus <= nodes * gpus <= sum(o.count * o.gpus_per_instance for o in dep.offers)


def test_skypilot_names_cloud_region_machine_and_tier() -> None:
    task = yaml.safe_load(render(GOLDEN["vllm-moe-two-replicas"])["skypilot.yaml"])
    assert task["resources"] == {
        "infra": "aws/us-east-1",
        "instance_type": "p4de.24xlarge",
        "accelerators": {"A100-80GB": 8},
        "use_spot": True,
        "disk_size": 256,
        "ports": [8000],
    }
    task = yaml.safe_load(render(GOLDEN["sglang-tp2-dp2"])["skypilot.yaml"])
    assert "instance_type" not in task["resources"]
    assert task["resources"]["accelerators"] == {"H200": 8}


def test_owned_machines_get_no_skypilot_file_and_the_notes_say_why() -> None:
    texts = render(GOLDEN["vllm-owned-4090"])
    assert not any(name.startswith("skypilot") for name in texts)
    assert "skypilot: the machines are your own" in texts["LAUNCH.md"]


def test_facts_cover_every_engine_and_checkpoint() -> None:
    assert set(facts()["engines"]) == set(engines())
    for engine in engines().values():
        row = facts()["engines"][engine.name]
        assert set(row["images"]) == set(engine.vendors)
        assert set(row["kv"]) == set(engine.kv_dtypes)
        assert {p.precision for p in engine.precisions if p.needs_checkpoint} <= set(facts()["checkpoints"])

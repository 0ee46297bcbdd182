"""What each engine is started with, read from the processes that serve.sh really starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.emit import render
from planner.engines.records import engines
from planner.errors import InvalidValueError
from tests.emit.helpers import started, value_of
from tests.emit.plans import GOLDEN, offer, owned, plan

FLAGS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "data/flags.yaml").read_text())
ENVIRONMENT = {"MASTER_ADDR": "10.0.0.1"}


def known(program: str, words: list[str]) -> set[str]:
    """Options the started program knows."""
    name = {
        "trtllm-serve": "tensorrt_llm",
        "trtllm-llmapi-launch": "tensorrt_llm",
        "text-generation-launcher": "tgi",
    }.get(program, program)
    if program == "python3" and words[:2] == ["-m", "sglang.launch_server"]:
        name = "sglang"
    if program == "transformers":
        name = "transformers_serve"
    return set(FLAGS[name]["flags"].split()) if name in FLAGS else set()


@pytest.mark.parametrize("name", GOLDEN)
def test_every_option_is_one_the_engine_knows(name: str, tmp_path: Path) -> None:
    calls = started(render(GOLDEN[name]), tmp_path, **ENVIRONMENT)
    assert calls
    for program, _, words in calls:
        used = {w for w in words if w.startswith("--")}
        assert used or words[0].endswith("serve_transformers.py")
        assert used <= known(program, words), used - known(program, words)


def test_a_typo_would_be_seen() -> None:
    assert "--tensor-paralel-size" not in FLAGS["vllm"]["flags"].split()
    assert min(len(row["flags"].split()) for row in FLAGS.values()) > 15
    assert all(row["source"] and row["version"] for row in FLAGS.values())


def test_vllm_says_what_was_planned(tmp_path: Path) -> None:
    ((program, _, words),) = started(render(GOLDEN["vllm-tp4"]), tmp_path)
    assert [program, *words[:2]] == ["vllm", "serve", "meta-llama/Llama-3.1-70B-Instruct"]
    expected = {
        "--tensor-parallel-size": "4",
        "--pipeline-parallel-size": "1",
        "--max-model-len": "4096",
        "--max-num-seqs": "64",
        "--max-num-batched-tokens": "8192",
        "--kv-cache-dtype": "fp8",
        "--gpu-memory-utilization": "0.9",
        "--dtype": "bfloat16",
        "--quantization": "fp8_per_tensor",
        "--host": "0.0.0.0",
        "--port": "8000",
    }
    assert {k: value_of(words, k) for k in expected} == expected


def test_environment_overrides(tmp_path: Path) -> None:
    env = {
        "MODEL": "./my model",
        "SERVED_NAME": "tiny",
        "PORT": "9001",
        "BIND_ADDRESS": "127.0.0.1",
        "EXTRA_ARGS": "--seed 3",
    }
    ((_, _, words),) = started(render(GOLDEN["vllm-tp4"]), tmp_path, **env)
    assert words[1] == "./my model"
    assert [value_of(words, o) for o in ("--served-model-name", "--port", "--host")] == ["tiny", "9001", "127.0.0.1"]
    assert words[-2:] == ["--seed", "3"]


def test_dense_replicas_share_one_vllm_and_experts_do_not(tmp_path: Path) -> None:
    ((_, visible, words),) = started(render(GOLDEN["vllm-two-replicas"]), tmp_path)
    assert (visible, value_of(words, "--data-parallel-size")) == ("", "2")
    calls = started(render(GOLDEN["vllm-moe-two-replicas"]), tmp_path)
    assert [(visible, value_of(words, "--port")) for _, visible, words in calls] == [("0,1", "8000"), ("2,3", "8001")]
    assert all("--data-parallel-size" not in words and "--enable-expert-parallel" in words for _, _, words in calls)


@pytest.mark.parametrize(("index", "replicas"), [("0", "2"), ("1", "1")])
def test_the_last_machine_runs_what_is_left(index: str, replicas: str, tmp_path: Path) -> None:
    calls = started(render(GOLDEN["vllm-three-replicas-two-machines"]), tmp_path, MACHINE_INDEX=index)
    assert [value_of(words, "--data-parallel-size") for _, _, words in calls] == [replicas]


@pytest.mark.parametrize(("index", "rank", "head"), [("0", "0", "a"), ("1", "1", "a")])
def test_nodes_find_their_head(index: str, rank: str, head: str, tmp_path: Path) -> None:
    ((_, _, words),) = started(render(GOLDEN["vllm-pp-two-nodes"]), tmp_path, MACHINE_INDEX=index, HOSTS="a\nb\n")
    assert (value_of(words, "--node-rank"), value_of(words, "--master-addr"), value_of(words, "--nnodes")) == (
        rank,
        head,
        "2",
    )
    assert ("--headless" in words) == (rank != "0")
    ((_, _, words),) = started(render(GOLDEN["sglang-two-nodes"]), tmp_path, MACHINE_INDEX=index, HOSTS="a b")
    assert (value_of(words, "--node-rank"), value_of(words, "--dist-init-addr")) == (rank, f"{head}:29501")


def test_second_replica_over_nodes_has_its_own_head(tmp_path: Path) -> None:
    made = plan("70b", tp=8, pp=2, dp=2, offers=(offer("l4", 8, 4, instance_type="g6.48xlarge"),))
    ((_, _, words),) = started(render(made), tmp_path, MACHINE_INDEX="3", HOSTS="a b c d")
    assert (value_of(words, "--node-rank"), value_of(words, "--master-addr")) == ("1", "c")


def test_attention_data_parallel(tmp_path: Path) -> None:
    ((_, _, words),) = started(render(GOLDEN["vllm-attention-dp"]), tmp_path)
    shown = [value_of(words, o) for o in ("--tensor-parallel-size", "--data-parallel-size", "--max-num-seqs")]
    assert shown == ["2", "4", "16"]
    sgl = plan("qwen3-30b-a3b", "sglang", tp=8, ep=8, groups=4)
    ((_, _, words),) = started(render(sgl), tmp_path)
    assert [value_of(words, o) for o in ("--tp-size", "--dp-size", "--ep-size")] == ["8", "4", "8"]
    assert "--enable-dp-attention" in words
    trt = render(plan("qwen3-30b-a3b", "tensorrt_llm", tp=8, ep=8, groups=8))
    assert yaml.safe_load(trt["trtllm_options.yaml"])["enable_attention_dp"] is True


def test_attention_data_parallel_over_two_machines(tmp_path: Path) -> None:
    texts = render(GOLDEN["vllm-attention-dp-two-nodes"])
    for index in ("0", "1"):
        ((_, _, words),) = started(texts, tmp_path, MACHINE_INDEX=index, HOSTS="a b")
        sizes = ("--tensor-parallel-size", "--data-parallel-size", "--data-parallel-size-local")
        assert [value_of(words, o) for o in (*sizes, "--data-parallel-address")] == ["1", "16", "8", "a"]
        assert ("--headless" in words) == (index == "1")
    assert value_of(words, "--data-parallel-start-rank") == "8"
    with pytest.raises(InvalidValueError, match="attention groups"):
        render(plan("qwen3-30b-a3b", tp=16, ep=16, groups=4, pp=2, offers=(offer(count=4),)))


def test_amd_uses_its_own_variable_and_image(tmp_path: Path) -> None:
    made = plan("qwen3-30b-a3b", tp=2, dp=2, offers=GOLDEN["vllm-amd"].deployment.offers)  # type: ignore[union-attr]
    texts = render(made)
    assert 'export HIP_VISIBLE_DEVICES="$gpus"' in texts["serve.sh"]
    assert "vllm-openai-rocm" in texts["docker-compose.yaml"]
    assert "/dev/kfd" in texts["docker-compose.yaml"]
    assert "amd.com/gpu" in texts["kubernetes.yaml"]
    assert len(started(texts, tmp_path)) == 2


@pytest.mark.parametrize("name", [e for e in engines() if e in ("vllm", "sglang")])
def test_every_precision_of_the_table_is_emitted_with_known_flags(name: str, tmp_path: Path) -> None:
    for row in engines()[name].precisions:
        kv = "fp16" if row.precision == "fp16" else "bf16"
        calls = started(render(plan(engine_name=name, precision=row.precision, kv=kv)), tmp_path)
        for program, _, words in calls:
            assert {w for w in words if w.startswith("--")} <= known(program, words)
            assert (row.flag or "") in " ".join(words)


def test_tgi_awq_has_no_dtype(tmp_path: Path) -> None:
    ((_, _, words),) = started(render(GOLDEN["tgi-awq"]), tmp_path)
    assert value_of(words, "--quantize") == "awq"
    assert "--dtype" not in words


def test_transformers_serve_only_where_it_suffices(tmp_path: Path) -> None:
    assert started(render(GOLDEN["transformers-serve"]), tmp_path)[0][0] == "transformers"
    many = plan("8b", "transformers", seqs=4, offers=(owned("rtx-4090", 1),))
    assert "serve_transformers.py" in render(many)


def test_a_checkpoint_is_named_where_one_is_needed() -> None:
    texts = render(GOLDEN["vllm-owned-4090"])
    for name in ("serve.sh", "LAUNCH.md"):
        assert "AWQ 4-bit checkpoint" in texts[name]
    assert "checkpoint" not in render(GOLDEN["vllm-tp4"])["serve.sh"]


def test_version_of_the_plan_is_pinned() -> None:
    base = GOLDEN["vllm-tp4"]
    assert base.deployment is not None
    texts = render(replace(base, deployment=replace(base.deployment, engine_version="0.32.0")))
    assert "vllm/vllm-openai:v0.32.0" in texts["docker-compose.yaml"]
    assert "vllm==0.32.0" in texts["skypilot.yaml"]

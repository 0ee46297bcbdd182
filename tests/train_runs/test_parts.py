"""Pieces of the emitted script, in this process: groups of layers, chunked loss, rows, the next plan."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.train_emit.plans import plan, tiny
from tests.train_runs.runs import emit, need

pytestmark = need("torch", "transformers")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    out = emit(tiny(), tmp_path_factory.mktemp("parts"))
    spec = importlib.util.spec_from_file_location("train_parts", out / "train_parts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def llama(layers: int = 5) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=layers, use_cache=False, **sizes))


def gradients(model: Any, ids: Any) -> tuple[float, dict[str, Any]]:
    model.train()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("every", [2, 3, 5])
def test_groups_keep_one_activation_every_k_layers(
    every: int, parts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    loss, wanted = gradients(llama(), ids)
    calls: list[int] = []
    plain = parts.checkpoint

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(*args, **kwargs)

    monkeypatch.setattr(parts, "checkpoint", counted)
    model = llama()
    names = set(model.state_dict())
    parts.checkpoint_groups(model, every)
    runs: list[int] = []
    for layer in model.model.layers._modules.values():
        layer.self_attn.register_forward_pre_hook(lambda *_: runs.append(1))
    found, grads = gradients(model, ids)
    assert len(calls) == -(-5 // every)
    assert len(runs) == 10  # every layer forward, and once more in the backward pass
    assert set(model.state_dict()) == names
    assert found == pytest.approx(loss)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted[name])


def test_groups_hold_fewer_saved_tensors_than_no_checkpoint(parts: ModuleType) -> None:
    import torch

    def saved(every: int) -> int:
        model, total = llama(), [0]
        if every:
            parts.checkpoint_groups(model, every)
        model.train()

        def pack(tensor: Any) -> Any:
            total[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(input_ids=torch.zeros(2, 16, dtype=torch.long), labels=torch.zeros(2, 16, dtype=torch.long))
        return total[0]

    assert saved(5) <= saved(2) < saved(0) / 3


def test_layers_of_two_kinds_are_refused(parts: ModuleType) -> None:
    model = SimpleNamespace(config=SimpleNamespace(layer_types=["full_attention", "sliding_attention"]))
    with pytest.raises(SystemExit, match="CHECKPOINT_INTERVAL=1"):
        parts.same_layers(model)


@pytest.mark.parametrize("chunk", [5, 15, 1000])
def test_chunked_loss_is_the_same_loss(chunk: int, parts: ModuleType) -> None:
    import torch

    ids = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, 4:9] = -100
    model = llama()
    wanted = model(input_ids=ids, labels=labels).loss
    wanted_items = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(77)).loss
    biggest = [0]
    model.lm_head.register_forward_hook(lambda m, i, out: biggest.__setitem__(0, max(biggest[0], out.numel())))
    parts.chunk_loss(model, chunk)
    torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, wanted)
    torch.testing.assert_close(
        model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(77)).loss, wanted_items
    )
    assert biggest[0] <= chunk * 64


def data(tiny_folder: Path, tmp_path: Path, dataset: Path, **kw: Any) -> Any:
    return argparse.Namespace(
        **(
            {
                "dataset": str(dataset),
                "text_field": "text",
                "model": str(tiny_folder / "model"),
                "output": str(tmp_path),
                "seq_len": 32,
                "packing": True,
                "micro_batch_size": 1,
                "data_parallel": 1,
            }
            | kw
        )
    )


def test_rows_are_cut_from_the_stream_or_padded(tiny_folder: Path, tmp_path: Path, parts: ModuleType) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder / "model")
    path = tmp_path / "three.jsonl"
    samples = ["the dog " * 5, "the fox " * 40, "jumps"]
    path.write_text("".join(json.dumps({"text": s}) + "\n" for s in samples))
    tokens = [[*tokenizer(s)["input_ids"], tokenizer.eos_token_id] for s in samples]
    stream = [t for sample in tokens for t in sample]
    rows = parts.Rows(data(tiny_folder, tmp_path, path), tokenizer)
    assert len(rows) == len(stream) // 32
    assert [t for i in range(len(rows)) for t in rows[i]["input_ids"].tolist()] == stream[: 32 * len(rows)]
    padded = parts.Rows(data(tiny_folder, tmp_path, path, packing=False), tokenizer)
    assert len(padded) == 3
    for i, sample in enumerate(tokens):
        kept = min(32, len(sample))
        row = padded[i]
        assert row["input_ids"].tolist()[:kept] == sample[:kept]
        assert row["attention_mask"].sum() == kept
        assert row["labels"].tolist() == sample[:kept] + [-100] * (32 - kept)


def test_what_a_dataset_lacks_is_said(tiny_folder: Path, tmp_path: Path, parts: ModuleType) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder / "model")
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(SystemExit, match="no column 'text', only body"):
        parts.Rows(data(tiny_folder, tmp_path, tmp_path / "a.jsonl"), tokenizer)
    (tmp_path / "b.txt").write_text("the\n")
    with pytest.raises(SystemExit, match="0 rows of 32 tokens, one micro-batch takes 1"):
        parts.Rows(data(tiny_folder, tmp_path, tmp_path / "b.txt"), tokenizer)


@pytest.mark.parametrize(
    ("micro", "accumulation", "interval", "expected"),
    [
        (8, 4, 0, "MICRO_BATCH_SIZE=4 GRADIENT_ACCUMULATION_STEPS=8"),
        (3, 4, 0, "MICRO_BATCH_SIZE=1 GRADIENT_ACCUMULATION_STEPS=12"),
        (1, 4, 0, "CHECKPOINT_INTERVAL=1"),
        (1, 4, 4, "CHECKPOINT_INTERVAL=1"),
        (1, 4, 1, "--zero-stage 3"),
    ],
)
def test_next_plan(micro: int, accumulation: int, interval: int, expected: str, parts: ModuleType) -> None:
    from planner.emit.train.layout import layout_of
    from planner.emit.train.settings import then_try

    made = plan(zero_stage=2, micro=micro, accumulation=accumulation, checkpoint_interval=interval)
    args = argparse.Namespace(
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        checkpoint_interval=interval,
        then_try=then_try(layout_of(made)),
    )
    assert expected in parts.next_plan(args)


@pytest.mark.parametrize("cpu", [True, False])
def test_deepspeeds_buffers_lose_their_names_once_all_have_mapped_them(
    cpu: bool, parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only this rank's own, only on CPUs, and not before the barrier."""
    names = [f"deepspeed_allreduce_buffer_{os.getuid()}_10.0.0.1_2900_{rank}" for rank in (0, 1)]
    for name in names:
        (tmp_path / name).touch()
    seen: list[int] = []
    monkeypatch.setattr(parts.torch.distributed, "barrier", lambda: seen.append(len(list(tmp_path.iterdir()))))
    monkeypatch.setattr(parts, "Path", lambda text: Path(text.replace("/dev/shm", str(tmp_path))))
    monkeypatch.setattr(parts, "RANK", 1)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "2900")
    parts.forget_buffers(argparse.Namespace(cpu=cpu))
    parts.forget_buffers(argparse.Namespace(cpu=cpu))  # a buffer that is not there is no error
    assert seen == ([2, 1] if cpu else [])
    assert [p.name for p in sorted(tmp_path.iterdir())] == (names[:1] if cpu else names)

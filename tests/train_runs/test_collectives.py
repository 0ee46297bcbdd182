"""Bytes of DeepSpeed's collectives on two CPU ranks, against those that the dry run derives from its rules."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from planner.validate import dry_states, dry_train
from planner.validate.dry_rank import Rank
from tests.train_runs.runs import environment, need

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 352, "vocab_size": 1024, "max_position_embeddings": 512,
}  # fmt: skip
RULES = {
    "stage3_prefetch_bucket_size": 20_000, "stage3_param_persistence_threshold": 1_000, "stage3_max_live_parameters": 400_000,
    "stage3_max_reuse_distance": 400_000,
}  # fmt: skip
BUCKETS = {"contiguous_gradients": True, "reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}


def really(folder: Path, raw: dict, zero: dict, interval: int, micro_batches: int) -> dict[str, float]:
    words = [json.dumps(x) for x in (raw, zero, interval, micro_batches)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(random.randint(20000, 55000)),
         str(Path(__file__).with_name("count_collectives.py")), *words],
        env=environment(folder, PYTHONPATH=str(ROOT)), cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("COUNTED ")).partition(" ")[2])


@pytest.mark.slow
@need("torch", "transformers", "deepspeed")
@pytest.mark.parametrize(
    ("stage", "interval", "tied", "micro_batches"),
    [(0, 0, False, 2), (1, 0, False, 2), (2, 0, False, 2), (3, 0, False, 2), (3, 1, True, 1), (3, 2, False, 1), (3, 4, False, 1)],
)  # fmt: skip
def test_deepspeed_sends_what_the_dry_run_says(tmp_path, monkeypatch, stage, interval, tied, micro_batches):
    raw = {**TINY, "tie_word_embeddings": tied}
    zero = {"stage": stage} | ({**BUCKETS, "overlap_comm": stage > 1} if stage else {}) | (RULES if stage == 3 else {})
    facts = {"deepspeed_stage3": RULES, "training": {"loss_chunk_tokens": 1024}}
    for module in (dry_states, dry_train):
        monkeypatch.setattr(module, "launch_facts", lambda: facts)
    rank = Rank("deepspeed", 2, stage, 1, 64, interval, "bf16", False, micro_batches > 1)
    got = dry_train.count(raw, TINY["num_hidden_layers"], rank)
    kinds = {*got.derived, *got.derived_each}
    said = {k: got.derived.get(k, 0.0) + micro_batches * got.derived_each.get(k, 0.0) for k in kinds}
    real = really(tmp_path, raw, zero, interval, micro_batches)
    scalars = 64  # clipping and overflow reduce single numbers
    for kind in {*said, *real}:
        assert said.get(kind, 0.0) == pytest.approx(real.get(kind, 0.0), abs=scalars), (kind, said, real)

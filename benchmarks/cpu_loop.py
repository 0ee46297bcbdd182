"""Predicted against measured on this machine's CPU: python -m benchmarks.cpu_loop --catalog DIR [--out FILE.csv] [--only NAME ...]

Plans ten training runs on `2xthis-cpu` (a folder of `planner calibrate --device cpu --processes 2`), runs the emitted launch.sh of
each, and compares the step time and the memory of the fullest process; and four servers (benchmarks/cpu_loop_serve.py).

Time: the shortest step after the first two (other programs on the machine only ever add time), of all repeats. Memory: the peak
resident set of a process (getrusage), against the plan's total, which holds the Python process with its libraries; and both again
without what a process holds before it loads a model (training.yaml, cpu: context_gib).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import planner
from benchmarks.cpu_loop_serve import SERVE_CASES, ServeCase, compare_serving
from planner.emit import write_files
from planner.engines.training import framework
from planner.hardware.catalog import find_gpu, load_catalog
from planner.plan import Plan
from planner.request import HardwareFilter, TrainJob, TrainPins, TrainRequest

SKIPPED_STEPS = 2
TIMEOUT_S = 600


@dataclass(frozen=True)
class Case:
    """A model and how it is trained. rows: sequences of a micro-batch."""

    name: str
    stack: str
    zero_stage: int
    hidden: int
    layers: int
    vocab: int
    seq_len: int
    rows: int
    accumulation: int = 1
    checkpoint_interval: int = 0


CASES = (
    Case("ddp-tiny", "ddp", 0, 256, 4, 2048, 256, 4),
    Case("ddp-40m", "ddp", 0, 512, 8, 4096, 256, 4, accumulation=2),
    Case("fsdp3-tiny", "fsdp2", 3, 256, 4, 2048, 256, 8),
    Case("fsdp2-30m-checkpoints", "fsdp2", 2, 512, 6, 4096, 512, 2, checkpoint_interval=1),
    Case("fsdp3-100m", "fsdp2", 3, 768, 10, 8192, 256, 4),
    Case("zero1-tiny", "deepspeed", 1, 256, 4, 2048, 256, 8),
    Case("zero2-40m", "deepspeed", 2, 512, 8, 4096, 512, 2, accumulation=2),
    Case("zero3-40m-checkpoints", "deepspeed", 3, 512, 8, 4096, 256, 4, checkpoint_interval=1),
    Case("zero1-150m", "deepspeed", 1, 1024, 10, 8192, 256, 2),
    Case("ddp-20m-checkpoints-of-2", "ddp", 0, 512, 6, 4096, 512, 2, checkpoint_interval=2),
)


def make_model(case: Case | ServeCase, folder: Path) -> None:
    """A random Llama, its tokenizer and a text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        ["the quick brown fox"], trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>").save_pretrained(folder / "model")
    torch.manual_seed(0)
    heads = case.hidden // 64
    shape = LlamaConfig(
        vocab_size=case.vocab, hidden_size=case.hidden, intermediate_size=case.hidden * 5 // 2, num_hidden_layers=case.layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=2048, bos_token_id=0, eos_token_id=1,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder / "model")
    words = random.Random(0)
    lines = ["".join(words.choice("abcdefgh ") for _ in range(200)) for _ in range(4000)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def planned(case: Case, model: Path, catalog: str, device: str, steps: int) -> Plan:
    """The plan with everything pinned."""
    batch = case.rows * case.accumulation * 2 * case.seq_len
    return planner.solve(
        TrainRequest(
            str(model), job=TrainJob(tokens=float(batch * steps), seq_len=case.seq_len, batch_tokens_low=batch, batch_tokens_high=batch),
            hardware=HardwareFilter(owned=f"2x{device}", catalog_dirs=(catalog,)),
            pins=TrainPins(
                framework=case.stack, tensor_parallel=1, pipeline_parallel=1, zero_stage=case.zero_stage,
                micro_batch_size=case.rows, checkpoint_interval=case.checkpoint_interval,
            ),
        )
    )  # fmt: skip


def run(plan: Plan, folder: Path) -> list[dict[str, Any]]:
    """The steps that launch.sh wrote. Raises RuntimeError with the end of its output when it fails."""
    out = folder / "run"
    write_files(plan, out, targets=("train",), force=True)
    port = str(random.randint(20000, 55000))
    env = os.environ | {
        "MODEL": str(folder / "model"), "DATASET": str(folder / "text.txt"), "OUTPUT_DIR": str(out / "output"), "MASTER_PORT": port,
        "HF_HUB_OFFLINE": "1", "EXTRA_ARGS": "--save-every 100000 --fresh", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    (out / "output/metrics.jsonl").unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", str(out / "launch.sh")],
        env=env,
        cwd=out,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    rows = [json.loads(line) for line in (out / "output/metrics.jsonl").read_text("utf-8").splitlines()]
    return [row for row in rows if row["event"] == "step"]


def compare(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """One line of the table."""
    catalog = load_catalog([arguments.catalog])
    gpu = find_gpu(arguments.device, catalog)
    base = framework(case.stack).on(gpu).number("context_gib")
    with tempfile.TemporaryDirectory(prefix="cpu-loop-") as name:
        folder = Path(name)
        make_model(case, folder)
        plan = planned(case, folder / "model", arguments.catalog, arguments.device, arguments.steps)
        if plan.memory is None:
            raise RuntimeError(f"{case.name}: {plan.infeasible}")
        steps = [row for _ in range(arguments.repeats) for row in run(plan, folder)[SKIPPED_STEPS:]]
    times = sorted(row["step_time_s"] for row in steps)
    measured, peak = times[0], max(row["peak_host_gib"] for row in steps)
    predicted, memory = plan.predicted["step_time_s"].value, plan.memory.total_gib
    return {
        "name": case.name, "parameters_m": round(plan.model.params_total / 1e6, 1), "step_s_predicted": round(predicted, 4),
        "step_s_shortest": round(measured, 4), "step_s_median": round(median(times), 4),
        "step_error_percent": round((predicted / measured - 1) * 100, 1),
        "memory_gib_predicted": round(memory, 3), "memory_gib_measured": round(peak, 3),
        "memory_error_percent": round((memory / peak - 1) * 100, 1),
        "above_base_predicted": round(memory - base, 3), "above_base_measured": round(peak - base, 3),
    }  # fmt: skip


def main() -> None:
    """Run the cases and print medians of the absolute errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--catalog", required=True, help="folder that planner calibrate wrote")
    parser.add_argument("--device", default="this-cpu")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in (*CASES, *SERVE_CASES)])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    training, serving = [], []
    for case in (*CASES, *SERVE_CASES):
        if arguments.only and case.name not in arguments.only:
            continue
        if isinstance(case, Case):
            training.append(row := compare(case, arguments))
        else:
            serving.append(row := compare_serving(case, arguments, make_model, TIMEOUT_S))
        print("  ".join(f"{k}={v}" for k, v in row.items()), flush=True)
    medians("training", training, ("step", "memory"))
    medians("serving", serving, ("tpot", "throughput", "memory"))
    if rows := training + serving:
        write_table(arguments.out, rows)


def medians(task: str, rows: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    """Print the medians of the absolute errors."""
    for key in (f"{name}_error_percent" for name in names if rows):
        print(f"{task}: median |{key}| over {len(rows)} runs: {median(abs(row[key]) for row in rows):.1f}")


def write_table(out: Path | None, rows: list[dict[str, Any]]) -> None:
    """All rows as CSV; what a row does not have stays empty."""
    if out:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()

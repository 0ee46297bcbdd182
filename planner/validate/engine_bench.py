"""`vllm bench serve` as the client, when it is asked for (--bench vllm). Options and result keys of vllm 0.32.0, benchmarks/serve.py."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

from planner.errors import EngineFailedError
from planner.plan import Plan
from planner.validate.engine_http import Server
from planner.validate.engine_load import ENOUGH_REQUESTS, Tell
from planner.validate.engine_process import Group, undisturbed
from planner.validate.engine_run import Options, environment, workplace

if TYPE_CHECKING:
    from planner.validate.engine_serve import Watch

KEYS = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}


def command(tool: str, server: Server, model: str, tokenizer: str, options: Options, folder: str) -> list[str]:
    """The command line: random prompts of the planned lengths, Poisson arrivals or the planned number of users."""
    load = options.load
    isl, osl = load.lengths[0]
    requests = load.requests or max(ENOUGH_REQUESTS, round((load.rate_per_s or 1.0) * (load.duration_s or 60.0)))
    words = [
        tool, "bench", "serve", "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions", "--model", model,
        "--tokenizer", tokenizer, "--dataset-name", "random", "--random-input-len", str(isl), "--random-output-len", str(osl),
        "--num-prompts", str(requests), "--num-warmups", "2", "--seed", str(load.seed), "--ignore-eos", "--disable-tqdm", "--save-result",
        "--result-dir", folder, "--result-filename", "result.json", "--percentile-metrics", "ttft,tpot,e2el",
        "--metric-percentiles", "50,95,99",
    ]  # fmt: skip
    if load.rate_per_s is not None:
        words += ["--request-rate", str(load.rate_per_s)]
    if load.concurrency is not None:
        words += ["--max-concurrency", str(load.concurrency)]
    return words


def read_result(tree: dict[str, Any]) -> tuple[dict[str, float], int, int]:
    """(keys of validation.measured, failed, answered) of its result file."""
    table: dict[str, float] = {}
    for theirs, ours in KEYS.items():
        names = {f"mean_{theirs}_ms": f"{ours}_ms_mean"} | {
            f"p{p}_{theirs}_ms": f"{ours}_ms_p{p}" for p in (50, 95, 99)
        }
        table |= {mine: float(tree[name]) for name, mine in names.items() if name in tree}
    answered = int(tree["completed"])
    table["throughput_tokens_per_s"] = float(tree["output_throughput"])
    for key, name in (("input_tokens_mean", "total_input_tokens"), ("output_tokens_mean", "total_output_tokens")):
        if answered and name in tree:
            table[key] = float(tree[name]) / answered
    return table, int(tree.get("failed") or 0), answered


def vllm_bench(
    server: Server, plan: Plan, options: Options, watch: Watch, tell: Tell
) -> tuple[dict[str, float], int, int]:
    """Run it to its end and read its result file."""
    tool = shutil.which("vllm", path=options.env.get("PATH"))
    if tool is None:
        raise EngineFailedError(
            "--bench vllm needs the program vllm", "it is not on PATH", "Install vllm[bench], or leave --bench out."
        )
    tokenizer = options.model_path or options.env.get("MODEL") or plan.model.hf_id
    model = options.env.get("SERVED_NAME") or plan.model.hf_id or tokenizer
    with workplace() as work:
        group = Group(
            command(tool, server, model, tokenizer, options, str(work)),
            environment("serve", options, work),
            work,
            work / "log",
        )
        began = time.monotonic()
        try:
            while group.exit_code is None:
                tell("vllm bench serve", time.monotonic() - began, None)
                time.sleep(0.5)
                watch.check("vllm bench serve was not done")
        finally:
            with undisturbed():
                group.stop()
        try:
            return read_result(json.loads((work / "result.json").read_text("utf-8")))
        except (OSError, ValueError, KeyError) as error:
            from planner.validate.engine_logs import failure

            raise failure("vllm bench serve wrote no result", "vllm", group.text()) from error

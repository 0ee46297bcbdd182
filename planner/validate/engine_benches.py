"""Load tools of others: their command lines, and their result files read into samples.

vllm 0.32.0 (benchmarks/serve.py), sglang 0.5.23 (benchmark/serving.py), aiperf 0.13.0 and guidellm 0.8.1, each run once against an emitted
server. Every request of theirs becomes a Sample, so that percentiles, means and verdicts are made as for planner's own client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.validate.engine_http import Server
from planner.validate.engine_load import Load, Sample

Read = tuple[list[Sample], dict[str, float]]  # samples, and what the tool alone knows (keys of validation.measured)
NO_REASON = "no reason is given"


@dataclass(frozen=True)
class Asked:
    """What a tool is asked for. folder: where its result goes. requests: how many."""

    tool: str
    servers: Sequence[Server]
    model: str
    tokenizer: str
    load: Load
    requests: int
    folder: str


@dataclass(frozen=True)
class Bench:
    """A tool. own_of: engines that bring it. result: its file in the folder. several: it loads several servers. key_variable: where it takes a key from."""

    name: str
    title: str
    program: str
    install: str
    own_of: tuple[str, ...]
    result: str
    words: Callable[[Asked], list[str]]
    read: Callable[[str, int], Read]
    module: str = ""
    several: bool = False
    key_variable: str = ""


def _vllm(a: Asked) -> list[str]:
    isl, osl = a.load.lengths[0]
    return [
        a.tool, "bench", "serve", "--backend", "openai", "--base-url", a.servers[0].url, "--endpoint", "/v1/completions",
        "--model", a.model, "--tokenizer", a.tokenizer, "--dataset-name", "random", "--random-input-len", str(isl),
        "--random-output-len", str(osl), "--num-prompts", str(a.requests), "--seed", str(a.load.seed), "--ignore-eos",
        "--disable-tqdm", "--save-result", "--save-detailed", "--result-dir", a.folder, "--result-filename", "result.json",
        *_rate(a.load, "--request-rate", "--max-concurrency"),
    ]  # fmt: skip


def _sglang(a: Asked) -> list[str]:
    """--random-range-ratio is the shortest as a share of the longest: 1 gives exact lengths, and the default anything below."""
    isl, osl = a.load.lengths[0]
    return [
        a.tool, "-m", "sglang.bench_serving", "--backend", "sglang-oai", "--base-url", a.servers[0].url, "--model", a.model,
        "--tokenizer", a.tokenizer, "--dataset-name", "random-ids", "--random-input-len", str(isl), "--random-output-len", str(osl),
        "--random-range-ratio", "1.0", "--num-prompts", str(a.requests), "--seed", str(a.load.seed), "--disable-tqdm",
        "--output-details", "--output-file", f"{a.folder}/result.jsonl", *_rate(a.load, "--request-rate", "--max-concurrency"),
    ]  # fmt: skip


def _aiperf(a: Asked) -> list[str]:
    isl, osl = a.load.lengths[0]
    return [
        a.tool, "profile", "--model", a.model, *(w for s in a.servers for w in ("--url", s.url)), "--endpoint-type", "completions",
        "--streaming", "--tokenizer", a.tokenizer, "--isl", str(isl), "--isl-stddev", "0", "--osl", str(osl), "--osl-stddev", "0",
        "--extra-inputs", "ignore_eos:true", "--use-legacy-max-tokens", "--use-server-token-count", "--request-count", str(a.requests),
        "--random-seed", str(a.load.seed), "--artifact-dir", a.folder, "--export-level", "records", "--ui", "none",
        "--no-gpu-telemetry", "--no-server-metrics",
        *(("--arrival-pattern", "poisson") if a.load.rate_per_s is not None else ()), *_rate(a.load, "--request-rate", "--concurrency"),
    ]  # fmt: skip


def _guidellm(a: Asked) -> list[str]:
    isl, osl = a.load.lengths[0]
    rate = f"kind=concurrent,streams={a.load.concurrency}"
    if a.load.rate_per_s is not None:
        rate = f"kind=poisson,rate={a.load.rate_per_s}"
    return [
        a.tool, "run", "--backend", f"kind=openai_http,target={a.servers[0].url},model={a.model},request_format=/v1/completions",
        "--profile", rate, "--constraint", f"kind=max_requests,count={a.requests}", "--tokenizer", f"kind=hf_auto,model={a.tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens={isl},output_tokens={osl}", "--seed", f"kind=static,value={a.load.seed}",
        "--output", f"kind=json,path={a.folder}/result.json", "--disable-console",
    ]  # fmt: skip


def _rate(load: Load, rate: str, users: str) -> tuple[str, ...]:
    if load.rate_per_s is not None:
        return (rate, str(load.rate_per_s))
    return (users, str(load.concurrency))


def _sample(
    sent_s: float, e2e_s: float, tokens: tuple[int, int], ttft_s: float | None, tpot_s: float | None = None
) -> Sample:
    """An answered request. TPOT = (E2E - TTFT) / (output tokens - 1) where the tool does not say it."""
    output = tokens[1]
    if tpot_s is None and ttft_s is not None and output > 1:
        tpot_s = (e2e_s - ttft_s) / (output - 1)
    return Sample(sent_s, sent_s + e2e_s, tokens[0], output, ttft_s, tpot_s)


def _failed(reason: Any) -> Sample:
    lines = [line.strip() for line in str(reason or "").splitlines() if line.strip()] or [NO_REASON]
    return Sample(0.0, 0.0, 0, 0, error=lines[-1 if lines[0].startswith("Traceback") else 0][:200])


def _lists(text: str, requests: int) -> Read:
    """vLLM and SGLang: one object with a list a quantity, an element a request. SGLang writes no start times, so its own throughput counts."""
    tree: dict[str, Any] = json.loads(text)
    starts = tree.get("start_times")
    first = min(starts) if starts else 0.0
    samples = []
    for i, error in enumerate(tree["errors"]):
        output = int(tree["output_lens"][i])
        if error or not output:
            samples.append(_failed(error or "an answer without tokens"))
            continue
        ttft = float(tree["ttfts"][i])
        e2e = float(tree["latencies"][i]) if "latencies" in tree else ttft + sum(tree["itls"][i])
        sent = starts[i] - first if starts else 0.0
        samples.append(_sample(sent, e2e, (int(tree["input_lens"][i]), output), ttft))
    alone = {} if starts else {"throughput_tokens_per_s": float(tree["output_throughput"])}
    return samples + [_failed(NO_REASON)] * (requests - len(samples)), alone


def _records(text: str, requests: int) -> Read:
    """aiperf: a line a request, those of its warm-up too."""
    rows = [row for row in map(json.loads, text.splitlines()) if row["metadata"]["benchmark_phase"] == "profiling"]
    first = min((row["metadata"]["request_start_ns"] for row in rows), default=0)
    samples = []
    for row in rows:
        value = {name: entry["value"] for name, entry in row["metrics"].items()}
        if row.get("error") or row["metadata"].get("was_cancelled") or not value.get("output_sequence_length"):
            error = row.get("error") or {"type": "no tokens were counted"}
            samples.append(_failed(" ".join(str(error[k]) for k in ("code", "type", "message") if error.get(k))))
            continue
        sent = (row["metadata"]["request_start_ns"] - first) / 1e9
        tokens = (int(value.get("input_sequence_length") or 0), int(value["output_sequence_length"]))
        samples.append(_sample(sent, value["request_latency"] / 1e3, tokens, value["time_to_first_token"] / 1e3))
    return samples + [_failed(NO_REASON)] * (requests - len(samples)), {}


def _guidellm_report(text: str, requests: int) -> Read:
    """guidellm: requests that were answered, failed and cut off, each with its own figures."""
    found = json.loads(text)["benchmarks"][0]["requests"]
    good = found["successful"]
    first = min((row["request_start_time"] for row in good), default=0.0)
    samples = []
    for row in good:
        tokens = (int(row["prompt_tokens"] or 0), int(row["output_tokens"] or 0))
        ttft_s, tpot_s = (
            row[k] / 1e3 if row[k] is not None else None for k in ("time_to_first_token_ms", "inter_token_latency_ms")
        )
        samples.append(_sample(row["request_start_time"] - first, row["request_latency"], tokens, ttft_s, tpot_s))
    samples += [_failed(row["info"].get("error")) for row in found["errored"] or ()]
    samples += [_failed("cut off") for _ in found["incomplete"] or ()]
    return samples + [_failed(NO_REASON)] * (requests - len(samples)), {}


VLLM = Bench(
    "vllm", "vllm bench serve", "vllm", "pip install 'vllm[bench]'", ("vllm",), "result.json", _vllm, _lists, key_variable="OPENAI_API_KEY"
)  # fmt: skip
SGLANG = Bench(
    "sglang", "sglang.bench_serving", "python3", "pip install sglang", ("sglang",), "result.jsonl", _sglang, _lists, module="sglang",
    key_variable="OPENAI_API_KEY",
)  # fmt: skip
AIPERF = Bench(
    "aiperf", "aiperf", "aiperf", "pip install aiperf", (), "profile_export.jsonl", _aiperf, _records, several=True
)  # fmt: skip
GUIDELLM = Bench(
    "guidellm", "guidellm", "guidellm", "pip install guidellm", (), "result.json", _guidellm, _guidellm_report
)
BENCHES = {b.name: b for b in (VLLM, SGLANG, AIPERF, GUIDELLM)}

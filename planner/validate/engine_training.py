"""A training plan for a few steps: start launch.sh, read its metrics until enough steps are done, stop it.

The run is ended after the last counted step, before it saves a model. Step time is the median without the first steps.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.engines.training import framework
from planner.errors import EngineFailedError, InputError, InvalidValueError
from planner.plan import Plan, TrainSettings
from planner.validate.engine_load import Tell
from planner.validate.engine_logs import failure, read_start, titan_steps
from planner.validate.engine_process import free_port, read_log
from planner.validate.engine_run import (
    EngineRun,
    Launch,
    Options,
    check_gpus,
    environment,
    on_cpu,
    running,
    script,
    too_late,
    workplace,
)
from planner.validate.engine_verdict import training_rows, training_verdicts

WARM_UP_STEPS = 2
POLL_S = 0.2
NEVER = 10**9  # steps between checkpoints of a run that is ended after a few
WORDS_LIMIT = 4_000_000
WORDS_PER_TOKEN = 1.2  # a random word is a token or more in every tokenizer: a margin, not an estimate
METRICS = "metrics.jsonl"
WRITES_METRICS = ("deepspeed", "fsdp2")


@dataclass(frozen=True)
class Step:
    """One step as it was logged. seconds and tokens per second of the whole run; peaks in GiB where known."""

    number: int
    seconds: float
    tokens_per_s: float
    peaks: dict[str, float]


def settings_of(plan: Plan) -> TrainSettings:
    """The training settings; InvalidValueError for what cannot be measured."""
    dep = plan.deployment
    if dep is None or dep.train is None:
        raise InvalidValueError("the plan has no training settings", "deployment.train is empty", "Solve again.")
    if dep.engine == "megatron_bridge":
        raise InvalidValueError(
            "Megatron-Bridge is not measured yet", "its log is not read", "Run LAUNCH.md by hand, or plan with another --framework."
        )  # fmt: skip
    return dep.train


def steps_of(plan: Plan, metrics: str, log: str) -> list[Step]:
    """The steps done so far: lines of metrics.jsonl, or torchtitan's log."""
    dep, train = plan.deployment, settings_of(plan)
    found = []
    for line in metrics.splitlines():
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError:
            continue  # the last line is still being written
        if row.get("event") == "step":
            peaks = {k: float(v) for k, v in row.items() if k.startswith("peak_")}
            found.append(Step(int(row["step"]), float(row["step_time_s"]), float(row["tokens_per_s"]), peaks))
    if dep is not None and dep.engine == "torchtitan":
        tokens = train.global_batch_size * train.seq_len
        for number, per_device in titan_steps(log):
            speed = max(per_device * dep.gpus, 1e-9)
            found.append(Step(number, tokens / speed, speed, read_start("torchtitan", log)))
    return found


def synthetic_text(plan: Plan, path: Path) -> Path:
    """Random words, enough for a few global batches: what is in them does not change how long a step takes."""
    train = settings_of(plan)
    words = int(min(WORDS_LIMIT, WORDS_PER_TOKEN * train.seq_len * (2 * train.global_batch_size + 2)))
    rng, letters = random.Random(0), "abcdefghijklmnopqrstuvwxyz"
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, words, 200):
            line = ("".join(rng.choices(letters, k=5)) for _ in range(min(200, words - first)))
            file.write(" ".join(line) + "\n")
    return path


def script_environment(plan: Plan, options: Options, output: str, dataset: str) -> dict[str, str]:
    """What launch.sh is told: where to write, what to read, and never to save."""
    dep = plan.deployment
    extra = options.env.get("EXTRA_ARGS", "")
    if dep is not None and dep.engine in WRITES_METRICS:
        longer = (
            f"--steps {options.steps + 1} " if options.steps >= settings_of(plan).steps else ""
        )  # it must not end, and save
        extra = f"--save-every {NEVER} {longer}{'--cpu ' if options.cpu else ''}{extra}".strip()
    return {"OUTPUT_DIR": output, "DATASET": dataset, "EXTRA_ARGS": extra}


def train_and_measure(plan: Plan, launch: Launch, options: Options, tell: Tell) -> EngineRun:
    """Start the emitted launch.sh here, let it do the steps, end it."""
    settings_of(plan)
    comparable, notes = check_gpus(plan, options)
    dep = plan.deployment
    if dep is not None and sum(o.count for o in dep.offers) > 1:
        raise InputError(
            "the plan spans several machines", "one cannot measure it",
            "Give --through slurm, skypilot, kubernetes or hostfile.",
        )  # fmt: skip
    words = script(launch, "launch.sh")
    with workplace() as work:
        dataset = options.dataset or str(synthetic_text(plan, work / "text.txt"))
        output, port = work / "output", free_port(options.port)
        env = environment("train", options, work, MASTER_PORT=str(port))
        env |= script_environment(plan, options, str(output), dataset)
        with running(words, env, launch.folder, work, (int(env["MASTER_PORT"]),)) as group:
            ends = time.monotonic() + options.timeout_s
            engine = dep.engine if dep else ""

            def look() -> list[Step]:
                steps = steps_of(plan, read_log(output / METRICS), group.text())
                if len(steps) < options.steps and group.exit_code is not None:
                    if group.exit_code == 0 and steps:
                        return steps
                    raise _ended(group.exit_code, engine, group.text(), steps, launch.install)
                if time.monotonic() > ends:
                    done = f"{len(steps)} of {options.steps} steps were done"
                    raise too_late(group, engine, done, options.timeout_s)
                return steps

            steps = wait_for_steps(look, options.steps, tell, lambda: group.exit_code is not None)
            log = group.text()
    return compared(plan, steps, options, log, comparable, notes)


def _ended(code: int, engine: str, log: str, steps: list[Step], install: str) -> EngineFailedError:
    what = f"the training ended with exit code {code} after {len(steps)} step{'s' if len(steps) != 1 else ''}"
    peaks = {k: v for s in steps for k, v in s.peaks.items()}
    shown = ", ".join(f"{k.removesuffix('_gib').replace('_', ' ')} {v:.2f} GiB" for k, v in peaks.items())
    return failure(what, engine, log, f"The steps before it took {shown}." if shown else "", install)


def wait_for_steps(
    look: Callable[[], list[Step]], wanted: int, tell: Tell, ended: Callable[[], bool], poll_s: float = POLL_S
) -> list[Step]:
    """Steps, once there are enough, or all when the run ended by itself."""
    began = time.monotonic()
    while True:
        over = ended()
        steps = look()
        if len(steps) >= wanted or over:
            return steps[:wanted]
        if steps:
            tell("training steps", len(steps), wanted)
        else:
            tell("starting the training", time.monotonic() - began, None)
        time.sleep(poll_s)


def compared(
    plan: Plan, steps: list[Step], options: Options, log: str, comparable: bool, notes: list[str]
) -> EngineRun:
    """The medians of the steps after the first ones, beside the plan."""
    counted = steps[min(WARM_UP_STEPS, max(0, len(steps) - 1)) :]
    dep = plan.deployment
    if not counted or dep is None:
        raise EngineFailedError("the training did no step", "", "Raise --timeout or --steps.")
    step_s = statistics.median(s.seconds for s in counted)
    speed = statistics.median(s.tokens_per_s for s in counted)
    measured = {"step_time_s": step_s, "tokens_per_s": speed, "tokens_per_s_per_gpu": speed / dep.gpus}
    peaks = [s.peaks for s in counted]
    for key in sorted({k for p in peaks for k in p}):
        measured[key] = max(p.get(key, 0.0) for p in peaks)
    if "peak_reserved_gib" in measured:
        n = framework(dep.engine).number  # torch's allocator does not see the context and communicators
        fixed = n("context_gib") + (n("nccl_gib") if dep.gpus > 1 else 0.0)
        measured["peak_memory_gib"] = measured["peak_reserved_gib"] + fixed
    elif on_cpu(plan) and "peak_host_gib" in measured:
        measured["peak_memory_gib"] = measured["peak_host_gib"]
    measured = read_start(dep.engine, log) | measured
    text = [f"Loaded {options.model_path}."] if options.model_path else []
    text += [
        f"Median of {len(counted)} steps; the first {len(steps) - len(counted)} are not counted.",
        "The data were random words." if options.dataset is None else f"The data were {options.dataset}.",
    ]
    verdicts = training_verdicts(plan, measured, len(counted))
    counts = {"steps": len(counted)}
    return EngineRun(training_rows(plan, measured), verdicts, measured, (*notes, *text), counts, comparable)

"""A serving engine under the planned load: start, wait until healthy, load, read its log, stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import EngineFailedError
from planner.plan import Plan
from planner.validate.engine_bench import AUTO, OWN, BenchFailedError, Choice, choose, run_bench
from planner.validate.engine_http import HttpError, Server, ask
from planner.validate.engine_load import Client, Sample, Tell, connect, run_load, warm_up
from planner.validate.engine_logs import death_of, failure, read_start
from planner.validate.engine_process import Group, free_port
from planner.validate.engine_run import (
    EngineRun,
    Launch,
    Options,
    check_gpus,
    environment,
    memory_used_gib,
    on_cpu,
    running,
    script,
    too_late,
    workplace,
)
from planner.validate.engine_stats import Measured, measured_of
from planner.validate.engine_verdict import serving_rows, serving_verdicts

POLL_S, ONE_TRY_S, ASK_JOB_EVERY_S = 0.5, 5.0, 10.0
PROBE_LIMIT_S = 300.0


@dataclass
class Watch:
    """What is watched while something is awaited: the engine's process or the submitted job, the end of time."""

    engine: str
    ends: float
    timeout_s: float
    group: Group | None = None
    gone: Callable[[], str | None] | None = None
    asked: float = 0.0
    install: str = ""
    stage: str = "starting the engine"

    def check(self, what: str) -> None:
        """Raises when the engine died or time is up. what: '... did not happen'."""
        if self.group is not None and self.group.exit_code is not None:
            raise failure(
                f"the engine ended with exit code {self.group.exit_code}",
                self.engine,
                self.group.text(),
                install=self.install,
            )
        if self.gone is not None and time.monotonic() - self.asked > ASK_JOB_EVERY_S:
            log, self.asked = self.gone(), time.monotonic()
            if log is not None:
                raise failure("the submitted job ended by itself", self.engine, log)
        if time.monotonic() > self.ends:
            if self.group is not None:
                raise too_late(self.group, self.engine, what, self.timeout_s)
            raise EngineFailedError(f"{what} within {self.timeout_s:g} s", "", "Raise --timeout.")


async def watched(work: Coroutine[Any, Any, Any], watch: Watch, what: str) -> Any:
    """The result of `work`, unless the engine dies or time is up before."""
    task = asyncio.ensure_future(work)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=POLL_S)
            if done:
                return task.result()
            await asyncio.to_thread(watch.check, what)  # asking a cluster takes time that the load must not wait for
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def healthy(server: Server, path: str, watch: Watch, tell: Tell) -> float:
    """Seconds until the server says that it is ready."""
    began = time.monotonic()
    while True:
        try:
            async with asyncio.timeout(ONE_TRY_S), ask(server, path) as answer:
                await answer.text()
            return time.monotonic() - began
        except (HttpError, OSError, ValueError, EOFError, TimeoutError):
            watch.check(f"{server.url}{path} did not answer")
        tell(watch.stage, time.monotonic() - began, None)
        await asyncio.sleep(POLL_S)


def model_names(plan: Plan, options: Options) -> list[str]:
    """Names under which the server may know the model, likeliest first."""
    known = [
        options.env.get("SERVED_NAME"),
        plan.model.hf_id,
        plan.model.name,
        options.model_path,
        options.env.get("MODEL"),
    ]
    return [name for name in known if name]


def vocabulary(plan: Plan, options: Options) -> int:
    """Entries that prompts may use: of the local checkpoint where one is given, else of the plan's model."""
    import json
    from pathlib import Path

    given = options.model_path or options.env.get("MODEL")
    path = Path(given) / "config.json" if given else None
    if path is not None and path.is_file():
        try:
            return int(json.loads(path.read_text("utf-8"))["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError):
            return plan.model.vocab
    return plan.model.vocab


async def connected(
    servers: Sequence[Server], plan: Plan, launch: Launch, options: Options, watch: Watch, tell: Tell
) -> tuple[float, list[Client]]:
    """(seconds to ready, clients) once every server is healthy and has answered a first request."""
    ready = max([await healthy(s, launch.health, watch, tell) for s in servers])
    longest = max(isl for isl, _ in options.load.lengths)
    names, vocab = model_names(plan, options), vocabulary(plan, options)
    clients = [
        await watched(connect(s, names, vocab, longest, PROBE_LIMIT_S), watch, "the engine did not answer a first request")
        for s in servers
    ]  # fmt: skip
    return ready, clients


@dataclass(frozen=True)
class Loaded:
    """What a client measured: samples, seconds to ready, figures that only a tool knows, the client's name, notes on those not used."""

    samples: list[Sample]
    ready_s: float
    alone: dict[str, float]
    client: str
    notes: tuple[str, ...] = ()


def measure(
    servers: Sequence[Server], plan: Plan, launch: Launch, options: Options, watch: Watch, tell: Tell
) -> Loaded:
    """The load over all servers by the chosen client; planner's own where a tool that was not asked for fails."""
    choice = choose(plan, options, servers)
    ready, clients = asyncio.run(connected(servers, plan, launch, options, watch, tell))
    notes = choice.notes
    if choice.bench is not None:
        try:
            return _by_tool(choice, servers, clients, ready, plan, options, watch, tell)
        except BenchFailedError as error:
            if options.bench != AUTO:
                raise
            notes = (*notes, f"{choice.bench.title} was not used: {error.what}: {error.why}.")
    samples = asyncio.run(watched(run_load(clients, options.load, tell), watch, "the load was not done"))
    return Loaded(samples, ready, {}, "planner", notes)


def _by_tool(
    choice: Choice, servers: Sequence[Server], clients: list[Client], ready: float, plan: Plan, options: Options, watch: Watch, tell: Tell
) -> Loaded:  # fmt: skip
    asyncio.run(watched(warm_up(clients, options.load, tell), watch, "the warm-up was not done"))
    samples, alone = run_bench(choice, servers, clients[0].model, plan, options, watch, tell)
    return Loaded(samples, ready, alone, choice.bench.title if choice.bench else OWN, choice.notes)


def serve_and_measure(plan: Plan, launch: Launch, options: Options, tell: Tell) -> EngineRun:
    """Start the emitted serve.sh here, load it, and stop it."""
    comparable, notes = check_gpus(plan, options)
    engine = plan.deployment.engine if plan.deployment else ""
    words = script(launch, "serve.sh")
    before = [] if options.cpu else memory_used_gib()
    with workplace() as work:
        first = free_port(options.port, max(launch.ports) + 1)
        env = environment(
            "serve", options, work, PORT=str(first), BIND_ADDRESS="127.0.0.1", MASTER_PORT=str(free_port())
        )
        first = int(env["PORT"])
        ports = tuple(first + offset for offset in launch.ports)
        with running(words, env, launch.folder, work, ports) as group:
            ends = time.monotonic() + options.timeout_s
            watch = Watch(engine, ends, options.timeout_s, group, install=launch.install)
            servers = [Server("127.0.0.1", port) for port in ports]
            run = loaded(servers, plan, launch, options, watch, tell, group.text, (comparable, notes))
            if on_cpu(plan):
                return with_memory(plan, run, group.peak_resident_gib())
            return with_gpu_memory(plan, run, before, [] if options.cpu else memory_used_gib())


def with_gpu_memory(plan: Plan, run: EngineRun, before: list[float], after: list[float]) -> EngineRun:
    """The run with the memory that the fullest GPU took since `before`: engines keep what they once reserved."""
    if not after or len(before) != len(after):
        return run
    return with_memory(plan, run, max(b - a for a, b in zip(before, after, strict=True)))


def with_memory(plan: Plan, run: EngineRun, peak_gib: float) -> EngineRun:
    """The run with its peak memory, where one is known: of the fullest GPU, or of the fullest process of a CPU plan."""
    if peak_gib <= 0:
        return run
    measured = run.measured | {"peak_memory_gib": peak_gib}
    return replace(run, measured=measured, rows=serving_rows(plan, measured))


def loaded(
    servers: Sequence[Server], plan: Plan, launch: Launch, options: Options, watch: Watch, tell: Tell, log: Callable[[], str],
    about: tuple[bool, list[str]],
) -> EngineRun:  # fmt: skip
    """Load servers that are starting or running, and compare. log: their log so far."""
    try:
        done = measure(servers, plan, launch, options, watch, tell)
    except EngineFailedError as error:
        error.last_lines = error.last_lines or death_of(log()).last_lines
        raise
    found = measured_of(done.samples)
    if not found.answered:
        reason = next(iter(found.failures), "no request was sent")
        raise failure(f"none of {found.failed} requests was answered ({reason})", watch.engine, log())
    table = found.table() | done.alone | {"start_s": done.ready_s}
    return _compare(plan, found, table, log(), (about[0], [*about[1], *done.notes]), done.client)


def _compare(
    plan: Plan, found: Measured, table: dict[str, float], log: str, about: tuple[bool, list[str]], client: str
) -> EngineRun:
    engine = plan.deployment.engine if plan.deployment else ""
    measured = dict(table) | read_start(engine, log)
    for name, source in (("ttft_ms", "ttft_ms_p95"), ("tpot_ms", "tpot_ms_mean"), ("e2e_ms", "e2e_ms_mean")):
        if source in measured:
            measured[name] = measured[source]
    comparable, notes = about
    sent = [f"{found.answered} requests were answered, {found.failed} failed (client: {client})."]
    sent += [f"{count} failed with: {reason}" for reason, count in list(found.failures.items())[:3]]
    if "input_tokens_mean" in measured:
        sent.append(
            f"Mean lengths {measured['input_tokens_mean']:.4g} tokens in and {measured['output_tokens_mean']:.4g} out."
        )
    verdicts = serving_verdicts(plan, found, measured)
    counts = {"requests": found.answered, "requests_failed": found.failed}
    return EngineRun(serving_rows(plan, measured), verdicts, measured, (*notes, *sent), counts, comparable, client)

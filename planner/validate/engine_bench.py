"""Which client sends the load (--bench), and a load tool of others run to its end. Their options and files: engine_benches.py.

auto: the engine's own tool where it is installed, else aiperf or guidellm, else planner's own client; whatever was not used is said.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import EngineFailedError, InputError
from planner.plan import Plan
from planner.validate.engine_benches import AIPERF, BENCHES, GUIDELLM, Asked, Bench, Read
from planner.validate.engine_http import Server
from planner.validate.engine_load import ENOUGH_REQUESTS, Load, Tell
from planner.validate.engine_logs import failure
from planner.validate.engine_process import Group, undisturbed
from planner.validate.engine_run import TOOL_LIMIT_S, Options, environment, workplace

if TYPE_CHECKING:
    from planner.validate.engine_serve import Watch

AUTO, OWN = "auto", "own"
OFFLINE = (
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)  # with one of these aiperf 0.13.0 takes a folder for a name of the hub
POLL_S = 0.5


class BenchFailedError(EngineFailedError):
    """The load tool did not do its job; the server may be well."""


@dataclass(frozen=True)
class Choice:
    """The client: a tool with its program, or planner's own (None). notes: tools that were not used, and why."""

    bench: Bench | None
    program: str = ""
    notes: tuple[str, ...] = ()


def choose(plan: Plan, options: Options, servers: Sequence[Server]) -> Choice:
    """The client of this run. InputError for a tool that was asked for and cannot send the load, EngineFailedError when it is not installed."""
    if options.bench == OWN:
        return Choice(None)
    if options.bench != AUTO:
        bench = BENCHES[options.bench]
        program, why = installed(bench, options.env), unfit(bench, plan, options, servers)
        if program is None:
            what = f"the package {bench.module}" if bench.module else f"the program {bench.program}"
            raise EngineFailedError(
                f"--bench {bench.name} needs {what}", "it is not on PATH", f"Install it with: {bench.install}, or leave --bench out."
            )  # fmt: skip
        if why:
            raise InputError(f"--bench {bench.name} cannot send this load", why, "Leave --bench out.")
        return Choice(bench, program)
    engine = plan.deployment.engine if plan.deployment else ""
    notes: list[str] = []
    for bench in (*(b for b in BENCHES.values() if engine in b.own_of), AIPERF, GUIDELLM):
        program = installed(bench, options.env)
        if program is None:
            continue
        why = unfit(bench, plan, options, servers)
        if not why:
            return Choice(bench, program, tuple(notes))
        notes.append(f"{bench.title} was not used: {why}.")
    return Choice(None, "", tuple(notes))


def installed(bench: Bench, env: Mapping[str, str]) -> str | None:
    """Path of the tool's program (of a Python module: of the interpreter that has it) where the scripts look; None without one."""
    program = shutil.which(bench.program, path=env.get("PATH"))
    if program is None or not bench.module:
        return program
    find = f"import importlib.util as u, sys; sys.exit(u.find_spec({bench.module!r}) is None)"
    try:
        done = subprocess.run([program, "-c", find], capture_output=True, timeout=TOOL_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return program if done.returncode == 0 else None


def unfit(bench: Bench, plan: Plan, options: Options, servers: Sequence[Server]) -> str:
    """Why this tool cannot send the load; '' when it can."""
    if len(options.load.lengths) > 1:
        return "it draws its own lengths, and takes none of --trace"
    if len(servers) > 1 and not bench.several:
        return f"it loads one server, and there are {len(servers)}"
    if servers[0].headers and not bench.key_variable:
        return "it takes an API key only on its command line, where others can read it"
    if not tokenizer_of(plan, options):
        return "it needs a tokenizer, and the plan names no checkpoint"
    return ""


def tokenizer_of(plan: Plan, options: Options) -> str:
    """Where the tools find the tokenizer: a folder or a name of the hub."""
    return options.model_path or options.env.get("MODEL") or plan.model.hf_id or ""


def requests_of(load: Load) -> int:
    """How many requests a tool sends: as many as asked for, or what the planned load sends in the time."""
    return load.requests or max(ENOUGH_REQUESTS, round((load.rate_per_s or 1.0) * (load.duration_s or 60.0)))


def run_bench(
    choice: Choice, servers: Sequence[Server], model: str, plan: Plan, options: Options, watch: Watch, tell: Tell
) -> Read:
    """Run the tool to its end and read its file. BenchFailedError with its last lines when it fails or writes none."""
    bench, requests = choice.bench, requests_of(options.load)
    if bench is None:
        raise ValueError("planner's own client is no tool")
    with workplace() as work:
        env = environment("serve", options, work)
        if servers[0].headers:
            env[bench.key_variable] = servers[0].headers[0][1].removeprefix("Bearer ")
        if bench is AIPERF and Path(tokenizer_of(plan, options)).is_dir():
            env = {k: v for k, v in env.items() if k not in OFFLINE}
        asked = Asked(choice.program, servers, model, tokenizer_of(plan, options), options.load, requests, str(work))
        group, began = Group(bench.words(asked), env, work, work / "log"), time.monotonic()
        try:
            while group.exit_code is None:
                tell(bench.title, time.monotonic() - began, None)
                time.sleep(POLL_S)
                watch.check(f"{bench.title} was not done")
            if group.exit_code:
                raise _failed(f"{bench.title} ended with exit code {group.exit_code}", bench, group.text())
        finally:
            with undisturbed():
                group.stop()
        try:
            return bench.read((work / bench.result).read_text("utf-8"), requests)
        except OSError:
            raise _failed(f"{bench.title} wrote no {bench.result}", bench, group.text()) from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            what = f"{bench.title} wrote a {bench.result} that is not understood ({type(error).__name__}: {error})"
            raise _failed(what[:200], bench, group.text()) from None


def _failed(what: str, bench: Bench, log: str) -> BenchFailedError:
    found = failure(what, bench.name, log, "Or give --bench own.", bench.install)
    error = BenchFailedError(found.what, found.why, found.next_step)
    error.last_lines = found.last_lines
    return error

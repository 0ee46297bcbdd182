"""What every engine run shares: what was asked, the environment of the scripts, the machine's GPUs, clearing up."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import EngineFailedError, InputError
from planner.plan import Plan
from planner.validate.engine_load import Load, Tell
from planner.validate.engine_logs import death_of, failure, rehearsal_environment
from planner.validate.engine_process import Group, is_open, undisturbed, workplace
from planner.validate.engine_verdict import Row, Verdict

MIB_PER_GIB = 1024
TOOL_LIMIT_S = 30
PORTS_FREE_S = 10.0


@dataclass(frozen=True)
class Launch:
    """The emitted files. install: the command that installs the engine ('' when it comes in a container). ports: of the replicas on this machine, as offsets from PORT. health: path that says ready."""

    folder: Path
    ports: tuple[int, ...] = (0,)
    health: str = "/health"
    port: int = 8000
    install: str = ""


@dataclass(frozen=True)
class Options:
    """How to run. timeout_s: for the whole run. steps: of training. env: given to the scripts, over everything else."""

    load: Load
    timeout_s: float = 1800.0
    port: int | None = None
    model_path: str | None = None
    url: str | None = None
    cpu: bool = False
    steps: int = 10
    dataset: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    bench: str = "auto"
    through: str | None = None


@dataclass(frozen=True)
class EngineRun:
    """What an engine run found. measured: keys of `validation.measured`; comparable: the hardware was the planned one; client: what sent the load."""

    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]
    measured: dict[str, float]
    notes: tuple[str, ...]
    counts: dict[str, int]
    comparable: bool = True
    client: str = ""

    @property
    def held(self) -> bool:
        """No limit was broken."""
        return all(v.verdict != "did not hold" for v in self.verdicts)

    def validation(self) -> dict[str, Any]:
        """The tree that goes into Plan.validation. Errors only where the hardware was the planned one."""
        errors = {r.name: round(r.error_percent, 2) for r in self.rows if r.error_percent is not None}
        return {
            "level": "engine",
            "measured": {k: round(v, 6) for k, v in self.measured.items()},
            "error_percent": errors if self.comparable else {},
            "limits": {
                v.limit: {"allowed": v.allowed, "measured": v.measured, "verdict": v.verdict} for v in self.verdicts
            },
            **self.counts,
            **({"client": self.client} if self.client else {}),
            "hardware": "as planned" if self.comparable else "not the planned one",
        }


def environment(task: str, options: Options, work: Path, **values: str) -> dict[str, str]:
    """Variables of the scripts: ours, those of this run, a CPU rehearsal's, the user's. Temporary files go into the run's folder."""
    temporary = work / "t"
    temporary.mkdir(exist_ok=True)
    base = {**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1", **values}
    if options.model_path:
        base["MODEL"] = options.model_path
    return {**base, **(rehearsal_environment(task) if options.cpu else {}), **options.env}


def check_gpus(plan: Plan, options: Options) -> tuple[bool, list[str]]:
    """(the GPUs are the planned ones, notes). EngineFailedError when there are none, too few, or the driver does not answer."""
    dep = plan.deployment
    if dep is None or not dep.offers:
        return True, []
    offer = dep.offers[0]
    if on_cpu(plan):
        return True, []
    if options.cpu:
        return False, [f"A rehearsal on CPUs: the plan is for {offer.gpu}, so differences say nothing about it."]
    if options.url or options.through or options.env.get("CUDA_VISIBLE_DEVICES") == "":
        return True, []
    wanted = min(dep.gpus, offer.gpus_per_instance)
    found = local_gpus()
    if found is None:
        return True, []
    if len(found) < wanted:
        raise EngineFailedError(
            f"the plan needs {wanted} GPU{'s' if wanted > 1 else ''} here and {len(found)} answered", "nvidia-smi sees no more" if found
            else "neither nvidia-smi nor an AMD device is here",
            "Run this on the planned machine, load a running server with --url, or rehearse with --cpu.",
        )  # fmt: skip
    same = all(_same(offer.gpu, name) for name in found)
    return same, [] if same else [f"The GPUs here are {found[0]}, the plan is for {offer.gpu}."]


def on_cpu(plan: Plan) -> bool:
    """Whether the plan is for a CPU device of the catalog."""
    from planner.hardware.catalog import load_catalog

    dirs = tuple(dict(plan.request.get("hardware") or {}).get("catalog_dirs") or ())
    names = [o.gpu for o in plan.deployment.offers] if plan.deployment else []
    if not names:
        return False
    gpu = load_catalog(dirs).gpus.get(names[0])
    return gpu is not None and str(gpu.vendor) == "cpu"


def local_gpus() -> list[str] | None:
    """Names of NVIDIA GPUs; [] when there are none; None for AMD, which is not queried."""
    if shutil.which("nvidia-smi") is None:
        return None if Path("/dev/kfd").exists() else []
    return nvidia_smi("name")


def memory_used_gib() -> list[float]:
    """GiB in use on each NVIDIA GPU; [] where that cannot be asked."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        return [float(mib) / MIB_PER_GIB for mib in nvidia_smi("memory.used")]
    except (EngineFailedError, ValueError):
        return []


def nvidia_smi(column: str) -> list[str]:
    """One column of nvidia-smi, a line a GPU. EngineFailedError when the driver does not answer."""
    tool = "nvidia-smi"
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={column}", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=TOOL_LIMIT_S, check=False
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineFailedError("nvidia-smi does not answer", type(error).__name__, "Check the GPU driver.") from error
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())[:160]
        raise EngineFailedError("nvidia-smi reports a fault", said, "Reload or update the GPU driver.")
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _same(planned: str, name: str) -> bool:
    """Whether a device name is that of a catalog GPU: every word of 'a100-sxm-80' but the form factor's is in it."""
    letters = "".join(c for c in name.lower() if c.isalnum())
    return all(
        w in letters for w in planned.lower().split("-") if w not in ("sxm", "sxm2", "pcie", "nvl", "ws", "server")
    )


@contextmanager
def running(
    words: list[str], env: Mapping[str, str], folder: Path, work: Path, ports: tuple[int, ...]
) -> Iterator[Group]:
    """The script while the work inside lasts. Afterwards no process of it is left and its ports are free."""
    group = Group(words, env, folder, work / "log")
    try:
        yield group
    finally:
        with undisturbed():
            group.stop()
            until = time.monotonic() + PORTS_FREE_S
            while time.monotonic() < until and any(is_open(p) for p in ports):
                time.sleep(0.1)


def script(launch: Launch, name: str) -> list[str]:
    """The command line of an emitted script; InputError when it is not there."""
    path = launch.folder / name
    if not path.is_file():
        raise InputError(f"{path} is not there", "", "Give --files with the folder that `planner emit` wrote.")
    return ["bash", str(path)]


def too_late(group: Group, engine: str, what: str, timeout_s: float) -> EngineFailedError:
    """The error for a run that took longer than --timeout. DeepSpeed builds its operators at the start, and waits for a lock without end."""
    late, text = f"{what} within {timeout_s:g} s", group.text()
    locks, known = group.stale_locks() if "deepspeed" in engine else (), death_of(text)
    if not locks:
        return failure(late, engine, text, "Or raise --timeout.")
    why = f"a build that was interrupted earlier left a lock, and DeepSpeed waits for it: {', '.join(map(str, locks))}"
    if known.meaning:
        why += f"; its log also says: {known.meaning}"
    error = EngineFailedError(late, why, "Remove the lock and try again.")
    error.last_lines = known.last_lines
    return error


__all__ = [
    "EngineRun",
    "Launch",
    "Options",
    "Tell",
    "check_gpus",
    "environment",
    "running",
    "script",
    "too_late",
    "workplace",
]

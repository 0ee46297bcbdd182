"""Plans over several machines: the emitted job goes through the tool that the user has, is measured, and is ended.

Serving: submit, find the address, load it from here, cancel. Training: submit, read metrics.jsonl until enough steps are done, cancel.
slurm: sbatch, squeue, scancel, scontrol; OUTPUT_DIR is on the file system that all machines share (the folder of --files).
skypilot: sky launch, sky status, ssh to the cluster's name, sky down. kubernetes: kubectl. hostfile: DeepSpeed over ssh.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import InputError
from planner.plan import Plan
from planner.validate.engine_jobs import FILES, JOBS, OUTPUT, Job
from planner.validate.engine_load import Tell
from planner.validate.engine_logs import failure
from planner.validate.engine_process import undisturbed
from planner.validate.engine_run import EngineRun, Launch, Options, environment, workplace
from planner.validate.engine_serve import Watch, loaded
from planner.validate.engine_training import compared, script_environment, steps_of, wait_for_steps

TOOLS = ("slurm", "skypilot", "kubernetes", "hostfile")
NEEDS = {
    "slurm": ("sbatch", "squeue", "scancel", "scontrol"),
    "skypilot": ("sky", "ssh"),
    "kubernetes": ("kubectl",),
    "hostfile": ("bash",),
}
GET_IT = {
    "slurm": "Run this on a login node of the cluster.",
    "skypilot": "Install it with: pip install 'skypilot[CLOUD]'.",
    "kubernetes": "Install kubectl and point it at the cluster.",
    "hostfile": "Run this on the first machine.",
}


@dataclass
class _Waiting:
    """A job that is waited for."""

    job: Job
    ends: float
    timeout_s: float

    def check(self, what: str) -> None:
        """Raises when the job has ended or time is up."""
        engine = self.job.plan.deployment.engine if self.job.plan.deployment else ""
        if (log := self.job.gone()) is not None:
            raise failure("the submitted job ended by itself", engine, log)
        if time.monotonic() > self.ends:
            raise failure(f"{what} within {self.timeout_s:g} s", engine, self.job.log(), "Or raise --timeout.")


def submitted(plan: Plan, launch: Launch, options: Options, tell: Tell) -> EngineRun:
    """Submit, measure, cancel, whatever happens in between."""
    kind = options.through or ""
    _ready(plan, launch, kind, options)
    with workplace() as work:
        env = environment(plan.task, options, work)
        env.pop("TMPDIR", None)  # a folder of this machine
        if plan.task == "train":
            place = str(launch.folder / OUTPUT) if kind in ("slurm", "hostfile") else ""
            more = script_environment(plan, options, place, options.dataset or "")
            env |= {k: v for k, v in more.items() if v}
        job = JOBS[kind](plan, launch, options, work, env)
        waiting = _Waiting(job, time.monotonic() + options.timeout_s, options.timeout_s)
        try:
            tell(f"submitting to {kind}", 0, None)
            job.submit()
            return _train(job, waiting, tell) if plan.task == "train" else _serve(job, waiting, tell)
        finally:
            with undisturbed():
                job.cancel()


def _ready(plan: Plan, launch: Launch, kind: str, options: Options) -> None:
    for tool in NEEDS[kind]:
        if shutil.which(tool, path=options.env.get("PATH")) is None:
            raise InputError(f"--through {kind} needs the program {tool}", "it is not on PATH", GET_IT[kind])
    if kind == "hostfile" and (
        plan.task != "train" or plan.deployment is None or plan.deployment.engine != "deepspeed"
    ):
        raise InputError(
            "--through hostfile is for DeepSpeed training", "other plans have no hostfile", "Use slurm or ssh by hand."
        )
    name = FILES.get((kind, plan.task), f"{kind}.yaml")
    if not (launch.folder / name).is_file():
        raise InputError(f"there is no {name} for this plan", "LAUNCH.md says why", "Choose another --through.")
    if plan.task == "train" and options.dataset is None and kind != "kubernetes":
        raise InputError(
            "--through needs --dataset", "it must be a path that every machine sees, or a hub name", "Give it."
        )


def _serve(job: Job, waiting: _Waiting, tell: Tell) -> EngineRun:
    began = time.monotonic()
    while not (servers := job.servers()):
        tell("waiting for machines", time.monotonic() - began, None)
        waiting.check("no server was up")
        time.sleep(1)
    engine = job.plan.deployment.engine if job.plan.deployment else ""
    watch = Watch(engine, waiting.ends, waiting.timeout_s, gone=job.gone)
    notes = [f"Submitted through {job.options.through}; loaded from this machine."]
    return loaded(servers, job.plan, job.launch, job.options, watch, tell, job.log, (True, notes))


def _train(job: Job, waiting: _Waiting, tell: Tell) -> EngineRun:
    def look() -> list[Any]:
        steps = steps_of(job.plan, job.metrics(), job.log())
        if len(steps) < job.options.steps:
            waiting.check(f"{len(steps)} of {job.options.steps} steps were done")
        return steps

    steps = wait_for_steps(look, job.options.steps, tell, lambda: False, poll_s=1.0)
    options = replace(job.options, dataset=job.options.dataset or "that of kubernetes.yaml")
    notes = [f"Submitted through {job.options.through}."]
    return compared(job.plan, steps, options, job.log(), True, notes)

"""`planner validate --level engine`: the emitted files are started, measured and stopped; predicted beside measured."""

from __future__ import annotations

import math
from dataclasses import replace

from planner.errors import InputError, NoPlanError
from planner.plan import Plan
from planner.validate.engine_load import Tell
from planner.validate.engine_process import ending_on_signals
from planner.validate.engine_run import EngineRun, Launch, Options, on_cpu
from planner.validate.engine_serve import serve_and_measure
from planner.validate.engine_training import train_and_measure
from planner.validate.engine_url import load_url


def engine_run(plan: Plan, launch: Launch, options: Options, tell: Tell) -> EngineRun:
    """Measure a plan with its real engine. tell(stage, done, total) is called as it goes on.

    Raises NoPlanError (nothing to start), InputError for what was asked, EngineFailedError when the engine does not start, dies or
    takes too long. Whatever happens, no process, port or temporary file of the run is left.
    """
    if plan.deployment is None:
        raise NoPlanError("the plan is infeasible", "there is no deployment to start", "Relax what it names.")
    if on_cpu(plan):
        options = for_cpu(plan, options)
    with ending_on_signals():
        if options.through is not None:
            from planner.validate.engine_submit import submitted

            return submitted(plan, launch, options, tell)
        if plan.task == "train":
            if options.url is not None:
                raise InputError("--url is for serving plans", "this is a training plan", "Leave it out.")
            return train_and_measure(plan, launch, options, tell)
        if options.url is not None:
            return load_url(plan, launch, options, tell)
        _one_machine(plan)
        return serve_and_measure(plan, launch, options, tell)


def for_cpu(plan: Plan, options: Options) -> Options:
    """Options for a plan whose devices are CPUs: the scripts run there, and vLLM is given the planned cache."""
    cache_gib = max(1, math.ceil(plan.memory.kv_cache_gib)) if plan.memory else 1
    return replace(options, cpu=True, env={"VLLM_CPU_KVCACHE_SPACE": str(cache_gib), **options.env})


def _one_machine(plan: Plan) -> None:
    dep = plan.deployment
    machines = sum(o.count for o in dep.offers) if dep else 1
    if machines > 1:
        raise InputError(
            f"the plan spans {machines} machines", "this one alone cannot measure it",
            "Give --through slurm, skypilot, kubernetes or hostfile, or load the running servers with --url.",
        )  # fmt: skip

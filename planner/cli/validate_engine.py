"""`planner validate --level engine`: options, files to start, load to send."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cli import options as opt
from planner.cli.options import Given, Group
from planner.cli.writing import check_writable, write_plan
from planner.errors import EXIT_NO_PLAN, InvalidValueError

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.validate.engine_run import Launch, Options

BENCHES = ("auto", "own", "vllm", "sglang", "aiperf", "guidellm")
MOST_SECONDS, MOST_STEPS = 7 * 86400.0, 100_000

ENGINE: Group = {
    "files": opt._text("Folder with the emitted files (default: emitted into a temporary folder).", "--files"),
    "through": opt._text("Submit it: slurm, skypilot, kubernetes or hostfile (training over ssh).", "--through"),
    "url": opt._text("Load a server that runs already; nothing is started.", "--url"),
    "model_path": opt._text("Checkpoint to use instead of the planned one: a folder or hub id.", "--model-path"),
    "dataset": opt._text("Training: data set to read (default: random words).", "--dataset"),
    "requests": opt._text("Serving: requests to send (default: at least 45 over 60 s).", "--requests"),
    "duration": opt._text("Serving: time to send requests for, such as 5m.", "--duration"),
    "trace": opt._text("Serving: CSV or JSON lines with the lengths of prompts and answers.", "--trace"),
    "bench": opt._text(
        "Serving: what sends the load. own (the built-in client), vllm, sglang (their bench tools), aiperf, guidellm; auto: the engine's "
        "own tool where it is installed, else aiperf or guidellm, else the built-in client.",
        "--bench",
        default="auto",
    ),
    "seed": opt._text("Serving: seed of arrivals and prompts.", "--seed", default="0"),
    "steps": opt._text("Training: steps to run; the first two are not counted.", "--steps", default="10"),
    "timeout": opt._text("Most time for the whole run.", "--timeout", default="30m"),
    "port": opt._text("Port to serve on, or where training ranks meet (default: a free one).", "--port"),
    "cpu": opt._flag("Rehearse on CPUs.", "--cpu"),
    "env": opt._many("NAME=VALUE for the emitted scripts (repeatable).", "--env"),
}


def engine_level(o: Given) -> int:
    """Run it, print it, write it into the plan."""
    from planner.engines.plan_facts import read_plan
    from planner.plan_seal import edit_notes
    from planner.report.progress import progress
    from planner.report.validation import engine_tree, print_engine
    from planner.validate.engine import engine_run

    plan, chosen = read_plan(o["plan_file"]), None
    out = Path(o["out"] or o["plan_file"])
    check_writable(out)
    with prepared(plan, o) as launch:
        chosen = options_of(plan, o, launch)
        with progress() as tell:
            found = engine_run(plan, launch, chosen, tell)
    found = replace(found, notes=(*found.notes, *edit_notes(plan)))
    write_plan(replace(plan, validation=found.validation()), out)
    print_engine(plan, engine_tree(found), str(out), json=o["json"])
    return 0 if found.held else EXIT_NO_PLAN


def options_of(plan: Plan, o: Given, launch: Launch) -> Options:
    """The options as the run wants them."""
    from planner.validate.engine_run import Options
    from planner.validate.engine_submit import TOOLS

    train = plan.task == "train"
    wrong = ("requests", "duration", "trace", "url") if train else ("dataset",)
    for name in wrong:
        if o[name] is not None:
            raise InvalidValueError(
                f"--{name} is for {'serving' if train else 'training'} plans", f"this is a {plan.task} plan", "Drop it."
            )
    steps = opt.whole(o["steps"], "--steps") or 10
    if steps > MOST_STEPS:
        raise InvalidValueError(f"--steps {steps} is more than {MOST_STEPS:,}", "", "Write for example --steps 20.")
    bench = opt.one_of(o["bench"], BENCHES, "bench")
    if bench not in ("auto", "own") and o["trace"] is not None:
        raise InvalidValueError(f"--bench {bench} takes no --trace", "it draws its own lengths", "Drop one of them.")
    return Options(
        load=load_of(plan, o),
        timeout_s=_seconds(o["timeout"], "--timeout") or 1800.0,
        port=_port(o["port"]),
        model_path=o["model_path"] or local_checkpoint(plan, o),
        url=o["url"],
        cpu=bool(o["cpu"]),
        steps=steps,
        dataset=str(Path(o["dataset"]).absolute()) if o["dataset"] and Path(o["dataset"]).exists() else o["dataset"],
        env=variables(o["env"] or ()),
        bench=bench,
        through=opt.one_of(o["through"], TOOLS, "way to submit") if o["through"] else None,
    )


def local_checkpoint(plan: Plan, o: Given) -> str | None:
    """The folder that was planned, where it holds weights and runs here; a checkpoint of the plan or MODEL goes before it."""
    import os

    folder = Path(str(plan.request.get("model") or ""))
    dep = plan.deployment
    elsewhere = o["through"] is not None or o["url"] is not None or "MODEL" in os.environ
    if elsewhere or dep is None or dep.checkpoint is not None or not (folder / "config.json").is_file():
        return None
    return str(folder.absolute()) if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")) else None


def load_of(plan: Plan, o: Given) -> Any:
    """The planned load with the lengths of the plan or of a trace."""
    from planner.validate.engine_load import Load
    from planner.validate.engine_trace import read_trace

    work: dict[str, Any] = dict(plan.request.get("workload") or {})
    isl, osl = int(work.get("input_tokens") or 1024), int(work.get("output_tokens") or 256)
    serve = plan.deployment.serve if plan.deployment else None
    longest = serve.max_model_len if serve else isl + osl
    lengths = ((isl, osl),) if o["trace"] is None else read_trace(Path(o["trace"]), longest)
    if o["trace"] is None and isl + osl > longest:
        raise InvalidValueError(
            f"{isl} + {osl} tokens do not fit the planned {longest}", "the engine would refuse every request", "Solve again."
        )  # fmt: skip
    rate, users = work.get("rate_per_s"), work.get("concurrency")
    seed = o["seed"]
    if not re.fullmatch(r"\d{1,9}", seed):
        raise InvalidValueError(f"--seed {seed!r} is not a whole number", "", "Write for example --seed 1.")
    return Load(
        lengths,
        float(rate) if rate and not users else None if users else 1.0,
        int(users) if users else None,
        opt.whole(o["requests"], "--requests"),
        _seconds(o["duration"], "--duration"),
        int(seed),
    )


def _seconds(text: str | None, flag: str) -> float | None:
    value = opt.duration(text, flag)
    if value is not None and value > MOST_SECONDS:
        raise InvalidValueError(f"{flag} {text} is longer than a week", "", f"Write for example {flag} 30m.")
    return value


def _port(text: str | None) -> int | None:
    value = opt.whole(text, "--port")
    if value is not None and not 1024 <= value <= 65535:
        raise InvalidValueError(f"--port {value} is not between 1024 and 65535", "", "Write for example --port 8000.")
    return value


def variables(pairs: list[str] | tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE pairs as a dict; $NAME in a value is filled in from the environment."""
    import os

    found = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise InvalidValueError(
                f"--env {pair[:60]!r} is not NAME=VALUE", "", "Write for example --env TMPDIR=/data."
            )
        found[name] = os.path.expandvars(value)
    return found


@contextmanager
def prepared(plan: Plan, o: Given) -> Iterator[Launch]:
    """The emitted files: those of --files, or written into a folder that is gone afterwards."""
    from planner.emit import write_files
    from planner.validate.engine_run import Launch

    ports, health, port = _places(plan)
    install = _install(plan)
    if o["files"] is not None:
        folder = Path(o["files"])
        if not folder.is_dir():
            raise InvalidValueError(
                f"--files {str(folder)!r} is no folder", "", "Give the folder that `planner emit` wrote."
            )
        yield Launch(folder.absolute(), ports, health, port, install)
        return
    shared = Path.cwd() if o["through"] in ("slurm", "hostfile") else None  # other machines must see it
    with tempfile.TemporaryDirectory(prefix="planner-files-", dir=shared) as name:
        write_files(plan, Path(name))
        yield Launch(Path(name), ports, health, port, install)


def _install(plan: Plan) -> str:
    """The command that installs the engine, '' where it comes in a container."""
    import shlex

    if plan.deployment is None:
        return ""
    if plan.task == "train":
        from planner.emit.train.layout import layout_of as train_layout

        packages = list(train_layout(plan).packages)
    else:
        from planner.emit.layout import layout_of

        packages = layout_of(plan).packages
    return f"python3 -m pip install {' '.join(shlex.quote(p) for p in packages)}" if packages else ""


def _places(plan: Plan) -> tuple[tuple[int, ...], str, int]:
    """(offsets of the replicas' ports on one machine, path of the health check, first port)."""
    if plan.task == "train" or plan.deployment is None:
        return (0,), "/health", 29500
    from planner.emit.balancer import endpoints
    from planner.emit.layout import layout_of

    layout = layout_of(plan)
    offsets = sorted({int(e.rpartition(":")[2]) - layout.port for e in endpoints(layout)})
    return tuple(offsets), str(layout.facts["health"]), layout.port

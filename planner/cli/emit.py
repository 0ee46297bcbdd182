"""`planner emit PLAN`: launch files from a plan file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.errors import InvalidValueError


def emit(
    plan_file: Annotated[
        Path, typer.Argument(metavar="PLAN", help="plan.yaml or plan.json, as written by `planner solve --out`.")
    ],
    out: Annotated[
        str, typer.Option("--out", metavar="DIR", help="Folder for the files; made when missing.")
    ] = "launch",
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these: serve, compose, kubernetes, skypilot, slurm, balancer, monitor, notes. Repeatable."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that planner did not write.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the written paths as JSON.")] = False,
) -> None:
    """Write the files that launch a plan: engine script, containers, Kubernetes, SkyPilot, Slurm, monitoring."""
    import json

    from planner.emit import write_files
    from planner.engines.plan_facts import read_plan
    from planner.plan_seal import EDITED, was_edited
    from planner.report.console import complain

    if not out:
        raise InvalidValueError("--out is empty", "", "Name a folder, for example --out launch/.")
    plan = read_plan(plan_file)
    paths = [str(path) for path in write_files(plan, Path(out), targets=target or (), force=force)]
    if was_edited(plan):
        complain(EDITED)
    typer.echo(json.dumps({"files": paths}, indent=2) if as_json else "\n".join(paths))

"""`planner calibrate`: measure this machine and write it as a catalog folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from planner.errors import InvalidValueError, UnknownNameError

DEVICES = ("auto", "cpu", "cuda")
SHORTEST_S, LONGEST_S = 1.0, 3600.0


def calibrate(
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="Folder for the measured machine.")],
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", help="Devices to measure at once: shares of the CPU (default 2), or GPUs (default all)."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the device in the catalog.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="About how long to measure.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine: matrix products, memory, attention, collectives, host link; and write it as a catalog folder.

    Use it with --catalog DIR --on 1xNAME. Needs pip install '.[profile]'.

    Example: planner calibrate --out this-machine
    """
    from planner.hardware.parse import NAME
    from planner.report.calibration import print_calibration
    from planner.report.progress import progress
    from planner.validate.calibrate.run import calibrate as measure

    if device not in DEVICES:
        raise UnknownNameError("device", device, DEVICES)
    if not out:
        raise InvalidValueError("--out is empty", "", "Name a folder, for example --out this-machine.")
    if not math.isfinite(seconds) or not SHORTEST_S <= seconds <= LONGEST_S:
        raise InvalidValueError(
            f"--seconds must be {SHORTEST_S:g} to {LONGEST_S:g}, not {seconds!r}",
            "",
            "Write for example --seconds 120.",
        )
    if name is not None and not NAME.match(name):
        raise InvalidValueError(
            f"--name {name[:80]!r} is no name of a device", "", "Use lower-case letters, digits, '-', '.' and '_'."
        )
    with progress() as tell:
        tree = measure(
            Path(out),
            device,
            processes,
            name,
            seconds,
            lambda stage, share: tell(stage.replace("_", " "), 100 * share, 100.0),
        )
    print_calibration(tree, json=as_json)

"""What a measurement of the machine found."""

from __future__ import annotations

from typing import Any

from planner.report.console import complain, say, say_json


def print_calibration(tree: dict[str, Any], *, json: bool) -> None:
    """The figures in short, the files, and what to do with them. tree: planner.validate.calibrate.run.summary."""
    if json:
        say_json(tree)
        return
    say(f"{tree['name']}: {tree['devices']} x {tree['model']} ({tree['software']})")
    for key, value in tree["rates"].items():
        say(f"  {key:<18}{value:>12,.4g}")
    points = ", ".join(f"{kernel.replace('_', ' ')} {count}" for kernel, count in tree["points"].items())
    say(f"  points measured   {points}")
    if tree["disturbed"]:
        complain(tree["disturbed"])
    for file in tree["files"]:
        say(f"Wrote {file}")
    say(f"Plan on it: planner solve --catalog {tree['folder']} --on {tree['devices']}x{tree['name']} ...")

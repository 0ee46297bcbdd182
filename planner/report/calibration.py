"""What a measurement found, and its progress on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from planner.report.console import complain, say, say_json

QUIET_S = 2.0
WIDTH = 30


class Bar:
    """One line on stderr that is rewritten; silent for the first two seconds, and plain lines where stderr is no terminal."""

    def __init__(self) -> None:
        self.began, self.shown, self.stage = time.monotonic(), False, ""

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown and sys.stderr.isatty():
            self._write("\r\x1b[K")

    def show(self, stage: str, share: float) -> None:
        """A stage and how much of it is done, 0..1."""
        if time.monotonic() - self.began < QUIET_S:
            return
        self.shown = True
        words = stage.replace("_", " ")
        if sys.stderr.isatty():
            done = round(WIDTH * min(1.0, share))
            self._write(f"\r\x1b[Kplanner: {words:<18} [{'#' * done}{'.' * (WIDTH - done)}]")
        elif stage != self.stage:
            self._write(f"planner: measuring {words}\n")
        self.stage = stage

    @staticmethod
    def _write(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


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

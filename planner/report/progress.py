"""Progress on stderr for what takes longer than two seconds: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 2.0
LINE_EVERY_S = 15.0
Tell = Callable[[str, float, float | None], None]


@contextmanager
def progress() -> Iterator[Tell]:
    """tell(stage, done, total): what is being done, how far; without a total, `done` are seconds."""
    if sys.stderr.isatty():
        with _bar() as tell:
            yield tell
    else:
        yield _lines()


@contextmanager
def _bar() -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    tasks: dict[str, int] = {}
    began = time.monotonic()

    def tell(stage: str, done: float, total: float | None) -> None:
        if time.monotonic() - began < PATIENCE_S:
            return
        if not tasks:
            bar.start()
        if stage not in tasks:
            for task in tasks.values():
                bar.update(task, visible=False)  # type: ignore[arg-type]
            tasks[stage] = bar.add_task(stage, total=total)
        bar.update(tasks[stage], completed=int(done), total=total)  # type: ignore[arg-type]

    try:
        yield tell
    finally:
        bar.stop()


def _lines() -> Tell:
    """For logs: one line a stage, and one every LINE_EVERY_S while it lasts."""
    began = time.monotonic()
    last: dict[str, float] = {}

    def tell(stage: str, done: float, total: float | None) -> None:
        now = time.monotonic()
        if now - began < PATIENCE_S or (stage in last and now - last[stage] < LINE_EVERY_S):
            return
        last[stage] = now
        far = f" {done:,.0f} of {total:,.0f}" if total else f" {done:,.0f}" if done else ""
        sys.stderr.write(f"planner: {stage}{far}\n")
        sys.stderr.flush()

    return tell

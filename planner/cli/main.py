"""The command `planner`: parse, call, render. Errors become one line on stderr and an exit code."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
from importlib import import_module
from typing import Any

import typer

from planner.errors import EXIT_BAD_INPUT, EXIT_FAULT, PlannerError

EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141  # 128 + SIGPIPE, as programs end whose reader is gone


def build_app() -> typer.Typer:
    """The whole command tree. Command modules import nothing heavy until they run."""
    from planner.cli import catalog, emit, model, serve
    from planner.cli.once import OnceCommand

    app = typer.Typer(
        name="planner",
        help="Which hardware, how many, configured how: plans for serving large language models, with proof and launch files.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command("solve", cls=OnceCommand)(serve.solve)
    app.command("compare", cls=OnceCommand)(serve.compare)
    app.command("estimate", cls=OnceCommand)(serve.estimate)
    app.command("memory", cls=OnceCommand)(serve.memory)
    app.command("emit", cls=OnceCommand)(emit.emit)
    app.command("accuracy", cls=OnceCommand)(import_module("planner.cli.accuracy").accuracy)
    app.command("validate", cls=OnceCommand)(import_module("planner.cli.validate").validate)
    app.command("calibrate", cls=OnceCommand)(import_module("planner.cli.calibrate").calibrate)
    app.add_typer(catalog.app, name="catalog")
    app.add_typer(model.app, name="model")
    app.callback()(_root)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        from planner import __version__
        from planner.report.console import say

        say(f"planner {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Plan before you rent."""


def run(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code; never raises for bad input."""
    try:
        result: Any = build_app()(args=arguments, standalone_mode=False)
        if result == EXIT_INTERRUPTED:
            return _fail("interrupted; nothing half-written is left", EXIT_INTERRUPTED)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except PlannerError as error:
        return _fail(str(error), error.exit_code, getattr(error, "last_lines", ()))
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted; nothing half-written is left", EXIT_INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        return EXIT_NO_READER
    except SystemExit as stop:
        _drop_output()  # click ends this way, with 1, when nobody reads the output any more
        return stop.code if isinstance(stop.code, int) and stop.code != EXIT_FAULT else EXIT_NO_READER
    except OSError as error:
        _drop_output()
        return _fail(
            f"input or output failed: {error.strerror or type(error).__name__}. Check the disk and where the output goes.",
            EXIT_BAD_INPUT,
        )
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return _help(error)
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _fail(f"{error.format_message()} See `planner --help`.", EXIT_BAD_INPUT)
        if os.environ.get("PLANNER_TRACEBACK"):
            raise
        return _fail(
            f"a fault of planner itself: {type(error).__name__}: {error}. Set PLANNER_TRACEBACK=1 to see where, and please report it with your command.",
            EXIT_FAULT,
        )


def _help(error: Any) -> int:
    """A group without a command shows its help on stderr, in its own lines, with the exit code of the command line library."""
    error.show()
    return int(error.exit_code)


def _drop_output() -> None:
    """What is still buffered goes nowhere: nobody reads it, or the disk is full."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(text: str, code: int, below: tuple[str, ...] = ()) -> int:
    from planner.report.console import complain

    complain("\n".join([" ".join(text.split()), *(f"  | {line}" for line in below)]))
    return code


def main() -> None:
    """Entry point of the console script. A command lives about a second: collecting cycles would cost a tenth of it."""
    gc.disable()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open until the process ends)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(run())

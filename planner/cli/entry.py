"""The console script: an interrupt while modules are still being read ends quietly too."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; 130 when interrupted before it could start."""
    try:
        from planner.cli.main import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("planner: interrupted; nothing half-written is left\n")
        sys.exit(130)

"""python -m planner."""

from planner.cli.entry import main

main()

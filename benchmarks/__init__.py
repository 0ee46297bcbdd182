"""Speed and memory of the planner, as ratios to things that do not change with the machine."""

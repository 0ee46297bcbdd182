"""`planner calibrate`: measure this machine and write it as a catalog folder of one's own."""

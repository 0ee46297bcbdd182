"""Measured efficiency surfaces of kernels, data only; made by scripts/fit_kernels.py."""

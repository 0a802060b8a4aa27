"""Measurements of grpo_fn. Each is a command, `python -m benchmarks.NAME`; README.md lists them."""

from runners.machine.startup import load_blas

# OpenBLAS only takes effect when it is loaded before the first import of mlx.core, which the modules here do.
load_blas()

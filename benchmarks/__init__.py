"""Measurements of grpo_fn, each a command: `python -m benchmarks.NAME`; README.md says what they show."""

from runners.machine.startup import load_blas

# OpenBLAS only takes effect when it is loaded before the first import of mlx.core, which the modules here do.
load_blas()

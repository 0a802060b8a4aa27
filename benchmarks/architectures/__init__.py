"""Tests every architecture of mlx-lm on a small random model: `python -m benchmarks.architectures`."""

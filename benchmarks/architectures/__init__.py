"""Every architecture of mlx-lm, tried on a small random model: `python -m benchmarks.architectures`."""

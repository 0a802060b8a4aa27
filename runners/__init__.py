"""Wraps grpo_fn: handles a training run's files, clocks, processes and terminals."""

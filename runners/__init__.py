"""The shell around grpo_fn: all of a training run's files, clocks, processes and terminals."""

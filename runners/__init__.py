"""The shell around grpo_fn: every file, clock, process and terminal that a training run touches."""

"""Measures models: evaluations during training, `grpo eval`, and the checks of `grpo check`."""

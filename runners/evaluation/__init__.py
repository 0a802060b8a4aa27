"""Measures models, for evaluations during training, for `grpo eval` and for `grpo check`."""

"""Measures models: exact match during training, `grpo eval`, and `grpo check` of rewards."""

"""Defines the `grpo` commands, one per module. Nothing heavy is imported before a command runs."""

"""The commands of `grpo`, one module each; nothing heavy is imported before a command runs."""

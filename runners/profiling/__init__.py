"""The time of a step by part, and what the machine allows: `grpo bench`."""

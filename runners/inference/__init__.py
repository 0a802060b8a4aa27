"""A model that answers: `grpo generate`, `grpo chat`, images. Training is not known here."""

"""Models that answer: `grpo generate`, `grpo chat`, images. Nothing here depends on training."""

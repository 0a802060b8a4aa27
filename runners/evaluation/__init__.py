"""How good a model is: exact match during training, `grpo eval`, and `grpo check` of rewards."""

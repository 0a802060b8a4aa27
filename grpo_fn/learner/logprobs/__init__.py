"""Log-probs of a batch's tokens: their positions, shared prompts, and the step from hidden
states."""

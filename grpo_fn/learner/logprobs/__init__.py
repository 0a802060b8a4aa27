"""Log-probs of a batch's tokens: at which positions, over which prompts, and from hidden states."""

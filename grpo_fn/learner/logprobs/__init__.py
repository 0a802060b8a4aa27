"""Computes the log-probs of a batch's tokens: their positions, shared prompts, and log-probs from
hidden states.
"""

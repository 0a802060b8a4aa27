"""Computes log-probs for a batch's tokens: from positions and shared prompts to hidden states, and
from hidden states to log-probs.
"""

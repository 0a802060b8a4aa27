"""Rewards: found by name, called safely, and combined into the learner's experience."""

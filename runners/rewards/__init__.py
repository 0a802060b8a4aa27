"""Rewards: found by name, called safely, combined into the experience that the learner is given."""

"""The training path, to be read in this order: train, setup, steps, rollout, gradients.

It may import every folder except commands and conversion.
"""

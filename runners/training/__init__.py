"""The training path. Read its modules in this order: train, setup, steps, rollout, gradients.

This folder may import every folder except commands and conversion.
"""

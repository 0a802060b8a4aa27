"""The training path; read it in this order: train, setup, steps, rollout, gradients.

It may import every folder except commands and conversion.
"""

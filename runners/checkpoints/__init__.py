"""A run's folder on disk: locked, saved, pruned, and opened again.

It does not depend on the training loop.
"""

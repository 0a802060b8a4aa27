"""A run's folder on disk: locked, saved, pruned, and opened again.

It knows nothing of the training loop.
"""

"""A run's folder on disk: locking, saving, pruning, and opening it again.

It does not depend on the training loop.
"""

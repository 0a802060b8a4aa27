"""Files that survive crashes and strangers: locks, whole writes, safe reads.

No model, no config; MLX inside functions.
"""

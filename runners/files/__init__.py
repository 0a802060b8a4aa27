"""Files that survive crashes, and untrusted ones: locks, whole writes, safe reads.

No model, no config; MLX inside functions.
"""

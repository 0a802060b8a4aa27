"""Files that survive crashes, and untrusted files: locks, complete writes, safe reads.

No model, no config; MLX inside functions.
"""

"""Files that survive crashes, and untrusted files: complete writes, safe reads.

No model, no config; MLX inside functions.
"""

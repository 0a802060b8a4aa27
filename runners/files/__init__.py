"""Files that survive crashes, and untrusted files: atomic writes and safe reads.

No model, no config; MLX inside functions.
"""

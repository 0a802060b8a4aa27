"""Writes files atomically so that they survive crashes, and reads untrusted files safely.

This folder does not read models or configs. It imports MLX only inside functions.
"""

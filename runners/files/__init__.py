"""Atomic writes that survive crashes, and safe reads of untrusted files.

Nothing here reads a model or a config; MLX is imported inside functions.
"""

"""Converts models: from other formats to mlx-lm folders, and from runs to folders for the Hub.

No training here.
"""

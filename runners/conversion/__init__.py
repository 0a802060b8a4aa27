"""Converts models: from other formats to mlx-lm folders, and from runs to folders for the Hub.

Nothing here trains a model.
"""

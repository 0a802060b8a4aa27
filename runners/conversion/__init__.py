"""Models in and out: other formats to mlx-lm folders, and runs to folders for the Hub.

No training here.
"""

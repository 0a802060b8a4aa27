"""Coordinates several processes of one run: their places, their messages, and their common end.

Imports machine, files and errors; MLX and grpo_fn only inside functions, because commands load this
folder.
"""

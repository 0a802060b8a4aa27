"""Coordinates several processes of one run: their places, their messages, and their common end.

This folder imports machine, files and errors. It imports MLX and grpo_fn only inside functions,
because commands load this folder.
"""

"""Many processes as one run: who they are, what they tell each other, and how they end together.

Imports machine, files and errors; MLX and grpo_fn inside of functions only, as commands load this folder.
"""

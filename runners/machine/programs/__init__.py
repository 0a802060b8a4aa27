"""Compiles the programs that MLX would compile during a run, before they are needed."""

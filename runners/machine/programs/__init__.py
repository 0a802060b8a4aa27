"""Compiles, before they are needed, the programs that MLX would compile during a run."""

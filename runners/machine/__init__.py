"""Manages the process and its machine: BLAS, backend, memory, signals, terminal.

It imports errors and files, and MLX only inside functions.
"""

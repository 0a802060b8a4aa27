"""Manages the process and its machine: BLAS, backend, memory, signals, terminal.

This folder imports errors and files. It imports MLX only inside functions.
"""

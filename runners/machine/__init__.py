"""The process and its machine: BLAS, backend, memory, signals, terminal.

Only errors is imported; MLX inside functions.
"""

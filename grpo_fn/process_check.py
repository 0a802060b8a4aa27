"""Raises an error in a forked process, where MLX would hang.

MLX computes in its own threads and, on a GPU, through a driver's context. A forked process has
neither the threads nor the context, so its first computation would hang.
"""

import os

_computing: list[int] = []  # the id of the process in which this library was used


def check_process() -> None:
    """Records that this process computes with MLX.

    Raises:
        RuntimeError: this process was forked from a process that had computed with MLX.
    """
    problem = fork_problem()
    if problem:
        raise RuntimeError(problem)
    if not _computing:
        _computing.append(os.getpid())


def fork_problem() -> str | None:
    """Returns the error text if this process was forked from a process that had computed with MLX,
    otherwise None.
    """
    process = os.getpid()
    if not _computing or _computing[0] == process:
        return None
    return (
        f"process {process} was forked from process {_computing[0]} after MLX was used there, and "
        'MLX hangs in such a process: start it with multiprocessing.get_context("spawn")'
    )

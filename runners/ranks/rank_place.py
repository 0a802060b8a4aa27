"""Reads this process's place among the ranks from the environment variables of `mlx.launch` or
`mpirun`.
"""

import json
import os
import stat
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from runners.errors import error_line, user_errors


@attrs.frozen
class RankPlace:
    """The place of a process among those that were started together."""

    rank: int
    size: int
    backend: str  # of mx.distributed
    local: int = 1  # ranks on this host, as far as the launcher tells


def read_rank_place(environ: Mapping[str, str] | None = None) -> RankPlace | None:
    """Returns this process's place, or None if it was started without a launcher or as the only
    rank.

    Raises UserError if the launcher's variables cannot be read.
    """
    with user_errors(
        "the launcher's variables do not contain a valid rank",
        OSError,
        LookupError,
        TypeError,
        ValueError,
        why=error_line,
    ):
        place = _place(os.environ if environ is None else environ)
    return place if place and place.size > 1 else None


def _place(environ: Mapping[str, str]) -> RankPlace | None:
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return RankPlace(
            int(environ["OMPI_COMM_WORLD_RANK"]), int(environ["OMPI_COMM_WORLD_SIZE"]), "mpi"
        )
    if not environ.get("MLX_RANK"):
        return None
    rank = int(environ["MLX_RANK"])
    if "MLX_WORLD_SIZE" in environ:
        return RankPlace(rank, int(environ["MLX_WORLD_SIZE"]), "nccl")
    if "MLX_IBV_DEVICES" in environ:
        return RankPlace(rank, len(_listed(environ["MLX_IBV_DEVICES"])), "jaccl")
    # Entries of a ring are such as ["127.0.0.1:32323"]; those with one address are on one host.
    hosts = [entry[0].rsplit(":", 1)[0] for entry in _listed(environ["MLX_HOSTFILE"])]
    return RankPlace(rank, len(hosts), "ring", hosts.count(hosts[rank])) if hosts else None


def _listed(path: str) -> list[Any]:
    """Returns the list in a launcher's file, with one entry per rank; the file is empty for a
    single rank.
    """
    return json.loads(Path(path).read_text(encoding="utf-8").strip() or "[]")


def share_cores(place: RankPlace, environ: MutableMapping[str, str]) -> None:
    """Assigns each rank of a host its share of the cores before the BLAS is loaded; a user's choice
    is kept.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environ.setdefault(name, str(max(cores // place.local, 1)))


def let_launcher_sleep(environ: Mapping[str, str] | None = None) -> None:
    """Fills this process's standard input if it is a pipe from `mlx.launch`; only on Linux.

    MLX 0.32.4's launcher waits until a rank writes something or its input is writable. Because the
    input is normally writable, the launcher never sleeps and occupies a core. A full pipe is not
    writable, and ranks never read it.
    """
    if "MLX_RANK" not in (os.environ if environ is None else environ) or sys.platform != "linux":
        return
    with suppress(OSError):  # closed, another user's, no /proc: the launcher stays awake
        if stat.S_ISFIFO(os.fstat(0).st_mode):
            end = os.open("/proc/self/fd/0", os.O_WRONLY | os.O_NONBLOCK)
            try:
                while True:  # until it is full
                    os.write(end, b"\n" * 4096)
            finally:
                os.close(end)

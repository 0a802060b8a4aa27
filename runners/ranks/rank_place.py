"""Reads this process's rank from the environment variables of `mlx.launch` or `mpirun`."""

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
    """A process's rank among the processes that were started together."""

    rank: int
    size: int
    backend: str  # backend for mx.distributed
    local: int = 1  # number of ranks on this host, if the launcher tells


def read_rank_place(environ: Mapping[str, str] | None = None) -> RankPlace | None:
    """Returns this process's place, or None if the process was started without a launcher or as the
    only rank.

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
    # A ring's entries look like ["127.0.0.1:32323"]; entries with the same address share a host.
    hosts = [entry[0].rsplit(":", 1)[0] for entry in _listed(environ["MLX_HOSTFILE"])]
    return RankPlace(rank, len(hosts), "ring", hosts.count(hosts[rank])) if hosts else None


def _listed(path: str) -> list[Any]:
    """Reads the list in a launcher's file, which has one entry per rank. For a single rank, the
    file is empty.
    """
    return json.loads(Path(path).read_text(encoding="utf-8").strip() or "[]")


def share_cores(place: RankPlace, environ: MutableMapping[str, str]) -> None:
    """Assigns an equal share of the cores to each rank on a host, before the BLAS is loaded. A
    user's setting is kept.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environ.setdefault(name, str(max(cores // place.local, 1)))


def let_launcher_sleep(environ: Mapping[str, str] | None = None) -> None:
    """Fills this process's standard input if it is a pipe from `mlx.launch`. Only on Linux.

    MLX 0.32.4's launcher waits until a rank writes something or a rank's input is writable. Because
    the input is normally writable, the launcher never sleeps and occupies a core. A full pipe is
    not writable, and ranks never read from it.
    """
    if "MLX_RANK" not in (os.environ if environ is None else environ) or sys.platform != "linux":
        return
    with suppress(OSError):  # stdin is closed or another user's, or no /proc exists
        if stat.S_ISFIFO(os.fstat(0).st_mode):
            end = os.open("/proc/self/fd/0", os.O_WRONLY | os.O_NONBLOCK)
            try:
                while True:  # until it is full
                    os.write(end, b"\n" * 4096)
            finally:
                os.close(end)

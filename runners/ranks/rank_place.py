"""This process's place among the ranks, from the environment variables of `mlx.launch` or `mpirun`."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import attrs

from runners.errors import UserError, show


@attrs.frozen
class RankPlace:
    """The place of a process among those that were started together."""

    rank: int
    size: int
    backend: str  # of mx.distributed
    local: int = 1  # ranks on this host, as far as the launcher tells


def read_rank_place(environ: Mapping[str, str] | None = None) -> RankPlace | None:
    """This process's place, or None if it was started without a launcher or as the only rank.

    Raises UserError if the launcher's variables contradict each other.
    """
    found = os.environ if environ is None else environ
    rank, local = found.get("MLX_RANK", ""), 1
    if "OMPI_COMM_WORLD_SIZE" in found:
        rank, size, backend = found.get("OMPI_COMM_WORLD_RANK", ""), found["OMPI_COMM_WORLD_SIZE"], "mpi"
    elif not rank:
        return None
    elif "MLX_WORLD_SIZE" in found:
        size, backend = found["MLX_WORLD_SIZE"], "nccl"
    else:
        backend = "jaccl" if "MLX_IBV_DEVICES" in found else "ring"
        listed = _listed(found, "MLX_IBV_DEVICES" if backend == "jaccl" else "MLX_HOSTFILE")
        # Entries of a ring are such as ["127.0.0.1:32323"]; those with one address are on one host.
        hosts = [
            str(entry[0]).rsplit(":", 1)[0] if isinstance(entry, list) and entry else "" for entry in listed
        ]
        size = str(len(listed))
        local = hosts.count(hosts[int(rank)]) if rank.isdigit() and int(rank) < len(hosts) else 1
    if not rank.isdigit() or not size.isdigit():
        raise UserError(f"the launcher's rank: expected integers, found rank {show(rank)} of {show(size)}")
    if int(size) < 2:
        return None
    if int(rank) >= int(size):
        raise UserError(f"the launcher's rank: expected 0 to {int(size) - 1}, found {rank}")
    return RankPlace(int(rank), int(size), backend, local)


def _listed(environ: Mapping[str, str], name: str) -> list[Any]:
    """The list in a launcher's file, one entry per rank; empty if the file is empty, as for one rank."""
    path = environ.get(name, "")
    try:
        with open(path, encoding="utf-8") as file:
            listed = json.loads(file.read().strip() or "[]")
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: {path or 'not set'}: not a list of ranks: {error}") from error
    if not isinstance(listed, list):
        raise UserError(f"{name}: {path}: expected a list of ranks, found {show(listed)}")
    return listed


def share_cores(place: RankPlace, environ: MutableMapping[str, str]) -> None:
    """Gives each rank of a host its part of the cores, before the BLAS is loaded; a user's choice stays."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environ.setdefault(name, str(max(cores // place.local, 1)))


def let_launcher_sleep(environ: Mapping[str, str] | None = None) -> None:
    """Fills this process's standard input if it is a pipe from `mlx.launch`; only on Linux.

    MLX 0.32.4's launcher waits until a rank writes something or can be written to. As a rank can always be
    written to, the launcher never sleeps and uses a core. A full pipe cannot be written to. Ranks never read
    it.
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

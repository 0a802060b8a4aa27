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
    local = 1
    if "OMPI_COMM_WORLD_SIZE" in found:
        rank, size, backend = found.get("OMPI_COMM_WORLD_RANK"), found["OMPI_COMM_WORLD_SIZE"], "mpi"
    elif "MLX_RANK" not in found:
        return None
    elif "MLX_WORLD_SIZE" in found:
        rank, size, backend = found["MLX_RANK"], found["MLX_WORLD_SIZE"], "nccl"
    else:
        backend = "jaccl" if "MLX_IBV_DEVICES" in found else "ring"
        name = "MLX_IBV_DEVICES" if backend == "jaccl" else "MLX_HOSTFILE"
        listed = _listed(name, found.get(name, ""))
        rank, size, local = found["MLX_RANK"], len(listed), _of_one_host(listed, found["MLX_RANK"])
    try:
        place = RankPlace(int(rank or ""), int(size), backend, local)
    except ValueError as error:
        raise UserError(
            f"the launcher's rank and number of ranks: found {show(rank)} of {show(size)}, wanted integers"
        ) from error
    if place.size < 2:
        return None
    if not 0 <= place.rank < place.size:
        raise UserError(f"the launcher's rank: found {place.rank}, wanted 0 to {place.size - 1}")
    return place


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
    found = os.environ if environ is None else environ
    if "MLX_RANK" not in found or sys.platform != "linux" or not _reads_a_pipe():
        return
    try:
        end = os.open("/proc/self/fd/0", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # another user's pipe, or no /proc: the launcher stays awake, nothing else happens
        return
    try:
        with suppress(BlockingIOError):  # it is full
            while True:
                os.write(end, b"\n" * 4096)
    finally:
        os.close(end)


def _reads_a_pipe() -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(0).st_mode)
    except OSError:  # it is closed
        return False


def _listed(name: str, path: str) -> list[Any]:
    """The list in a launcher's file, one entry per rank; empty if the file is empty, as for one rank."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        listed = json.loads(text) if text.strip() else []
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: {path or 'not set'}: not a list of ranks: {error}") from error
    if not isinstance(listed, list):
        raise UserError(f"{name}: {path}: found {show(listed)}, wanted a list of ranks")
    return listed


def _of_one_host(listed: list[Any], rank: str) -> int:
    """How many entries, such as ["127.0.0.1:32323"], have the same address as this rank's."""
    addresses = [
        str(entry[0]).rsplit(":", 1)[0] if isinstance(entry, list) and entry else "" for entry in listed
    ]
    mine = int(rank) if rank.isdigit() else -1
    return addresses.count(addresses[mine]) if 0 <= mine < len(addresses) else 1

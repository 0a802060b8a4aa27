"""Connects a process to the others of its run; the ranks exchange their hosts."""

from __future__ import annotations

import os
from contextlib import suppress

from runners.errors import UserError
from runners.machine.signals import StopSignals
from runners.ranks.rank_place import RankPlace
from runners.ranks.scoreboard import WORKING, Scoreboard
from runners.ranks.watchdog import Watchdog
from runners.ranks.wire import Wire


def connect(place: RankPlace, timeout: float, signals: StopSignals) -> tuple[Wire, list[str]]:
    """The connection to the others of `place`, and every rank's host; waits for all of them.

    `timeout`: seconds that this, or a collective, may take. A signal ends the process while it waits. The
    ranks of one host see each other on a scoreboard.

    Raises UserError if the ranks cannot connect.
    """
    import mlx.core as mx

    from grpo_fn.learner import MlxCollectives

    watchdog = Watchdog(place.rank, timeout, signals)
    watchdog.start()
    watchdog.begins("the start")
    try:
        with signals.ending_at_once():
            group = mx.distributed.init(strict=True, backend=place.backend)
    except RuntimeError as error:
        watchdog.stop()
        raise UserError(f"{watchdog.name} cannot join the others: {error}") from error
    watchdog.ends()
    on_cuda = place.backend == "nccl"
    collectives = MlxCollectives(group, None if on_cuda else mx.Device(mx.cpu), scatters=on_cuda)
    wire = Wire(collectives, watchdog)
    return wire, _introduce(wire, place)


def _introduce(wire: Wire, place: RankPlace) -> list[str]:
    keys = wire.gather_values("the hosts' names", _host_key())
    mine = [rank for rank, key in enumerate(keys) if key == keys[place.rank]]
    own = Scoreboard.create(place.size) if mine[0] == place.rank else None
    board = None
    try:
        paths = wire.gather_values("the scoreboards", own)
        with suppress(OSError):  # two containers on one host treat each other as different hosts
            board = Scoreboard(paths[mine[0]], place.size, place.rank)
            board.write(WORKING)
        opened = wire.gather_values("open scoreboards", board is not None)
    finally:
        if own:
            Scoreboard.remove(own)
    here = [rank for rank in mine if board and opened[rank] and rank != place.rank]
    hosts = [key.rsplit("/", 1)[0] for key in keys]
    wire.watchdog.see([f"rank {rank} ({host})" for rank, host in enumerate(hosts)], here, board)
    return hosts


def _host_key() -> str:
    """The host's name, with what distinguishes two hosts or containers of the same name."""
    boot = ""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{os.uname().nodename}/{boot}"

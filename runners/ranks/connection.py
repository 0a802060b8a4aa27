"""Connects a process to the others of its run; the ranks exchange their hosts."""

from __future__ import annotations

import os
from contextlib import suppress

from runners.errors import UserError
from runners.machine.signals import StopSignals
from runners.ranks.messages import RankMessage
from runners.ranks.rank_place import RankPlace
from runners.ranks.scoreboard import WORKING, Scoreboard
from runners.ranks.watchdog import Watchdog
from runners.ranks.wire import Wire


def connect(place: RankPlace, timeout: float, signals: StopSignals) -> Wire:
    """The connection to the others of `place`; waits for all of them.

    `timeout`: seconds that this, or a collective, may take. A signal ends the process while it waits.

    Raises UserError if the ranks cannot connect.
    """
    import mlx.core as mx

    from grpo_fn.learner import MlxCollectives

    name = f"rank {place.rank} ({os.uname().nodename})"
    watchdog = Watchdog(name, timeout, signals)
    watchdog.rank = place.rank
    watchdog.start()
    watchdog.begins("the start")
    try:
        with signals.ending_at_once():
            group = mx.distributed.init(strict=True, backend=place.backend)
    except RuntimeError as error:
        watchdog.stop()
        raise UserError(f"{name} cannot join the others: {error}") from error
    watchdog.ends()
    if (group.rank(), group.size()) != (place.rank, place.size):
        watchdog.stop()
        raise UserError(
            f"the backend {place.backend} made rank {group.rank()} of {group.size()}; the launcher "
            f"wanted rank {place.rank} of {place.size}"
        )
    on_cuda = place.backend == "nccl"
    return Wire(MlxCollectives(group, None if on_cuda else mx.Device(mx.cpu), scatters=on_cuda), watchdog)


def introduce(wire: Wire, number: int, count: int) -> list[str]:
    """Every rank's host. From now on the ranks of one host see each other on a scoreboard."""
    watchdog = wire.watchdog
    keys = [message.value for message in wire.all_gather_object(RankMessage("the hosts' names", _host_key()))]
    mine = [rank for rank, key in enumerate(keys) if key == keys[number]]
    own = Scoreboard.create(count) if mine[0] == number else None
    try:
        paths = [message.value for message in wire.all_gather_object(RankMessage("the scoreboards", own))]
        with suppress(OSError):  # two containers on one host treat each other as different hosts
            wire.board = Scoreboard(paths[mine[0]], count, number)
            wire.write(WORKING)
        found = wire.all_gather_object(RankMessage("open scoreboards", wire.board is not None))
        opened = [message.value for message in found]
    finally:
        if own:
            Scoreboard.remove(own)
    mine = [rank for rank in mine if wire.board and opened[rank]]
    hosts = [key.rsplit("/", 1)[0] for key in keys]
    watchdog.names = [f"rank {rank} ({host})" for rank, host in enumerate(hosts)]
    watchdog.here = [rank for rank in mine if rank != number]
    elsewhere = [rank for rank in range(count) if rank not in (*mine, number)]
    watchdog.elsewhere = ", ".join(watchdog.names[rank] for rank in elsewhere)
    watchdog.board = wire.board
    return hosts


def _host_key() -> str:
    """The host's name, with what distinguishes two hosts or containers of the same name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{os.uname().nodename}/{boot}"

"""Ranks without a network: the launcher's variables, messages, the scoreboard, signals."""

import os
import select
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.errors import UserError
from runners.machine.signals import Stopped, StopSignals
from runners.ranks.messages import RankError, RankMessage, decode_message, encode_message
from runners.ranks.rank_place import RankPlace, read_rank_place, share_cores
from runners.ranks.ranks import Ranks
from runners.ranks.watchdog import ENDED, WAITING, Scoreboard, Watchdog
from runners.training.train import run_training
from tests.support.processes.waiting import HANGS
from tests.support.resuming import config_in


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"MLX_RANK": "1", "MLX_HOSTFILE": '[["a:1"], ["b:1"], ["b:2"]]'}, RankPlace(1, 3, "ring", 2)),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": ""}, None),  # the only rank
        ({"MLX_RANK": "2", "MLX_WORLD_SIZE": "4"}, RankPlace(2, 4, "nccl")),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, RankPlace(0, 2, "mpi")),
        ({"MLX_RANK": "1", "MLX_IBV_DEVICES": "[[null, 1], [1, null]]"}, RankPlace(1, 2, "jaccl")),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "{"}, "variables do not contain a valid rank: JSONDecodeError"),
        ({"MLX_RANK": "x", "MLX_WORLD_SIZE": "4"}, "variables do not contain a valid rank: .*'x'"),
    ],
)
def test_the_place_is_read_from_the_launchers_variables(tmp_path, environ, found):
    """Without a launcher there is no place; invalid variables are an error."""
    for name in {"MLX_HOSTFILE", "MLX_IBV_DEVICES"} & environ.keys():
        (tmp_path / name).write_text(environ[name])
        environ = {**environ, name: str(tmp_path / name)}
    if isinstance(found, str):
        with pytest.raises(UserError, match=found):
            read_rank_place(environ)
    else:
        assert read_rank_place(environ) == found


def test_ranks_of_a_host_share_its_cores():
    """Each rank gets at least one core; a number that the user has set is kept."""
    environ = {"MKL_NUM_THREADS": "7"}
    share_cores(RankPlace(0, 10_000, "ring", 10_000), environ)
    assert environ == {"MKL_NUM_THREADS": "7", "OPENBLAS_NUM_THREADS": "1"}


@given(
    st.recursive(st.none() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists),
    st.dictionaries(st.text(max_size=5), st.lists(st.integers(0, 255)), max_size=3),
)
def test_messages_are_decoded_as_they_were_encoded(value, arrays):
    """This holds for plain values and arrays of any length, and for half a surrogate pair."""
    made = {name: np.array(array, np.uint8) for name, array in arrays.items()}
    own = RankMessage("here", [value, made, {"array": "0"}], error="é\ud800")
    found = decode_message(encode_message(own))
    assert (found.where, found.value[0], found.error) == ("here", value, "é\ud800")
    assert found.value[2] == {"array": "0"}
    assert {name: array.tolist() for name, array in found.value[1].items()} == arrays


def test_a_single_rank_exchanges_with_itself():
    """An exchange returns the rank's own value, without a collective or a thread."""
    ranks = Ranks()
    assert ranks.is_alone
    assert ranks.all_gather_object("here", {"a": 1}) == [{"a": 1}]
    assert ranks.any_rank("here", True)
    with pytest.raises(RankError, match="x"), ranks.ending_together():
        raise RankError("x")


@pytest.fixture
def path():
    """A scoreboard's file for three ranks."""
    path = Scoreboard.create(3)
    yield path
    os.unlink(path)


def test_the_scoreboard_detects_ended_ranks(path):
    """The lock of a slot ends with its process; its message stays."""
    board = Scoreboard(path, 3, 0)
    board.write(WAITING)
    code = (
        "import sys, time\nfrom runners.ranks.watchdog import *\n"
        "board = Scoreboard(sys.argv[1], 3, 1)\nboard.write(ENDED, 'no disk')\n"
        "print('ready', flush=True)\ntime.sleep(6000)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    watchdog = Watchdog(0, 10, StopSignals())
    watchdog.names, watchdog.here, watchdog.board = ["rank 0", "rank 1", "rank 2"], [1], board
    assert not board.is_gone(1) and watchdog.gone() is None
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert board.is_gone(1) and board.is_gone(2)  # the third never came
    assert watchdog.gone() == "rank 1: no disk"
    assert board.read(0)[:2] == (WAITING, 1) and board.read(1) == (ENDED, 0, "no disk")
    board.write(ENDED, "é" * 5000)  # longer than a slot
    assert set(board.read(0)[2][:-1]) == {"é"}


def test_a_rank_that_waits_too_long_ends_and_names_the_missing(path):
    """The process ends with exit code 4 and a message."""
    code = (
        "import sys, time\nfrom runners.ranks.watchdog import *\n"
        "board = Scoreboard(sys.argv[1], 3, 0)\nboard.write(WAITING)\n"
        "dog = Watchdog(0, 0.2, StopSignals())\n"
        "dog.names, dog.here, dog.board = ['rank 0 (a)', 'rank 1 (a)'], [1], board\n"
        "dog.start()\nwith dog.waiting('the rollout'):\n    time.sleep(6000)"
    )
    other = Scoreboard(path, 3, 1)
    other.write(ENDED)
    command = [sys.executable, "-c", code, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 4
    assert f"rank 0 ({os.uname().nodename}) ends: the rollout did not finish within" in done.stderr
    assert "waited for rank 1 (a)" in done.stderr


def two_ranks(inner, gone=None):
    """Rank 0 of two, with the collectives of `inner` and a watchdog that reports `gone`."""
    signals = StopSignals()
    ranks = Ranks(signals=signals)
    ranks.count, ranks.hosts = 2, ["here", "here"]
    ranks._collectives = inner
    ranks.watchdog.gone = lambda: gone
    return ranks


def receive(ranks):
    """Sends a signal to this rank."""
    ranks._signals._receive(signal.SIGTERM, None)


class Echo:
    """Another rank that sends the same messages; `act` is called in each collective."""

    def __init__(self, act=lambda: None):
        self.act = act

    def all_gather(self, x):
        import mlx.core as mx

        self.act()
        return mx.concatenate([x, x])


def test_a_signal_waits_for_the_end_of_an_exchange_and_of_a_commit():
    """Otherwise, the other rank would be at another point, or take a step that this one drops."""
    ranks = two_ranks(Echo(lambda: receive(ranks)))
    calls, done = [], []
    exchange = ranks._exchange
    ranks._exchange = lambda own: calls.append(found := exchange(own)) or found
    with pytest.raises(Stopped):
        ranks.all_gather_object("here", "x" * 5000)  # two collectives
    assert [message.value for message in calls[0]] == ["x" * 5000] * 2
    ranks = two_ranks(Echo())
    with pytest.raises(Stopped), ranks.committing("a step"):
        receive(ranks)
        ranks.all_gather_object("the metrics")
        done.append("the step")
    with pytest.raises(Stopped), ranks.committing("another step"):  # another rank has received it before
        done.append("another step")
    assert done == ["the step"]
    with pytest.raises(Stopped):  # outside of both, it ends the block immediately
        receive(two_ranks(Echo()))


def test_the_launchers_sigterm_is_not_the_reason():
    """If another rank has ended before, that rank is reported, and no message announces a save."""

    def lost():
        raise RuntimeError("connection to a peer was lost")

    said = []
    ranks = two_ranks(Echo(lost), gone="rank 1 (here) has disappeared: it was killed or crashed")
    ranks.alert(said.append)("Saving after this step.")
    with pytest.raises(RankError, match=r"rank 1 \(here\) has disappeared"), ranks.ending_together():
        receive(ranks)
    # The signal arrives during an exchange.
    ranks = two_ranks(Echo(lambda: (receive(ranks), lost())), gone="rank 1 (here) has disappeared")
    with pytest.raises(RankError, match="disappeared"), ranks.ending_together():
        try:
            ranks.all_gather_object("here")
        finally:
            with ranks._signals.deferred():  # the display's last block
                pass
    assert said == []
    alive = two_ranks(Echo())
    alive.alert(said.append)("Saving after this step.")
    assert said == ["Saving after this step."]


def test_the_config_sets_the_time_limit_of_collectives(tmp_path):
    """A run passes system.collective_timeout to its ranks."""
    ranks = Ranks()
    run_training(config_in(tmp_path, "system.collective_timeout=7", "optim.max_steps=1"), ranks=ranks)
    assert ranks.watchdog.timeout == 7.0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a pipe cannot be filled from its other end")
@pytest.mark.parametrize("environ", [{"MLX_RANK": "0"}, {}])
def test_the_standard_input_of_a_rank_is_filled(environ):
    """The launcher's `select` then waits; the input of other processes is not touched."""
    code = (
        "import time\nfrom runners.ranks.rank_place import let_launcher_sleep\n"
        f"let_launcher_sleep({environ})\nprint('done', flush=True)\ntime.sleep(6000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        _, takes, _ = select.select([], [process.stdin], [], 0)
        process.kill()
    assert bool(takes) == (not environ)

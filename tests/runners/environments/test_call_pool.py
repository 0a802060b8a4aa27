"""Calls beside the decoding: together, with a limit of time, and whatever they do."""

import asyncio
import threading
import time

import pytest

from runners.environments import call_pool
from runners.environments.call_pool import CallPool
from tests.support.processes.waiting import HANGS


def all_of(pool, count):
    """All outcomes."""
    found = {}
    while len(found) < count:
        found |= pool.collect(1)
    return found


@pytest.mark.parametrize("kind", ["threads", "coroutines"])
def test_rows_wait_once(kind):
    """32 calls, each of which ends when all have begun."""
    pool, begun, all_begun = CallPool(32, HANGS), [], threading.Barrier(32)

    async def later(row):
        begun.append(row)
        while len(begun) < 32:
            await asyncio.sleep(0.001)
        return row

    def meeting(row):
        all_begun.wait()
        return row

    for row in range(32):
        if kind == "threads":
            pool.submit(row, lambda row=row: meeting(row))
        else:
            pool.submit_async(row, lambda row=row: later(row))
    found = pool.collect(32)
    assert {row: outcome.value for row, outcome in found.items()} == {row: row for row in range(32)}


def test_no_more_threads_than_workers():
    """Calls beyond that wait for one."""
    pool, running, most = CallPool(3, HANGS), [], []

    def act():
        running.append(1)
        most.append(len(running))
        time.sleep(0.01)
        running.pop()

    for row in range(12):
        pool.submit(row, act)
    assert len(all_of(pool, 12)) == 12 and max(most) <= 3


def test_what_goes_wrong_is_one_line_and_ends_nothing():
    """Exceptions, exits and interrupts of the call's own; the next call runs as if nothing had been."""

    def fails(error):
        raise error

    pool = CallPool(2, HANGS)
    errors = [ValueError("no such\nitem"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]
    for row, error in enumerate(errors):
        pool.submit(row, lambda error=error: fails(error))
    faults = [outcome.fault for _, outcome in sorted(all_of(pool, 4).items())]
    assert all(faults) and "no such" in faults[0] and not any("\n" in fault for fault in faults)
    pool.submit(0, lambda: 7)
    assert pool.collect(1)[0].value == 7


def test_a_call_that_hangs_is_left_behind():
    """It counts as late after its time; its worker's place is taken by another."""
    pool, release = CallPool(1, 1.0), threading.Event()
    pool.submit(0, release.wait)
    pool.submit(1, lambda: "next")
    found = all_of(pool, 2)
    assert found[0].timed_out and "1 s" in found[0].fault
    assert found[1].value == "next" and pool.hung == 1
    release.set()
    pool.submit(0, lambda: "again")
    assert pool.collect(1)[0].value == "again", "what came back late is nobody's outcome"


def test_a_coroutine_that_is_late_is_cancelled():
    """Others that run beside it are not."""
    pool = CallPool(1, 1.0)

    async def slow():
        await asyncio.sleep(6000)

    async def quick():
        return 1

    pool.submit_async(0, slow)
    pool.submit_async(1, quick)
    found = all_of(pool, 2)
    assert found[0].timed_out and found[1].value == 1


def test_too_many_calls_that_hang_end_the_calling(monkeypatch):
    """Then a call is answered by a line at once."""
    monkeypatch.setattr(call_pool, "MAX_HUNG", 2)
    pool, release = CallPool(1, 0.1), threading.Event()
    for row in range(4):
        pool.submit(row, release.wait)
    found = all_of(pool, 4)
    release.set()
    assert sum(outcome.timed_out for outcome in found.values()) == 2
    assert sum("still hang" in outcome.fault for outcome in found.values()) == 2
    pool.submit(9, lambda: 1)
    assert "still hang" in pool.collect(1)[9].fault

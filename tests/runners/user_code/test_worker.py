"""User code in a separate process: any call ends within its time limit, and the next call works."""

import os
import subprocess
import sys
import time

import pytest

from runners.errors import UserError
from runners.rewards.scoring import Scorer, resolve_rewards
from runners.user_code.process import THREAD, TOGETHER
from runners.user_code.worker import Calls, Worker
from tests.support.processes.new_process import ROOT
from tests.support.processes.waiting import HANGS, wait_until

REWARDS = r'''
import asyncio, multiprocessing, os, signal, sys, time

def ones(completions, **_):
    return [1.0] * len(completions)

def loops(completions, **_):
    while True:
        pass

def computes(completions, **_):
    return [9 ** 9 ** 9]

def exits(completions, **_):
    os._exit(3)

def leaves(completions, **_):
    sys.exit(3)

async def interrupts(completions, **_):
    raise KeyboardInterrupt

def floods(completions, log_extra, **_):
    log_extra("text", ["x" * 70_000_000] * len(completions))
    return [1.0] * len(completions)

async def blocks(completions, **_):
    time.sleep(300)

async def waits(completions, **_):
    await asyncio.sleep(300)

async def later(completions, **_):
    await asyncio.sleep(0)
    return [2.0] * len(completions)

def length(text):
    return float(len(text))

def pools(completions, **_):
    with multiprocessing.get_context("spawn").Pool(2) as pool:  # leaving the block terminates its processes
        return pool.map(length, [completion[0]["content"] for completion in completions])

def alarms(completions, **_):
    """A time limit by a signal, which only a main thread has."""
    def late(*_):
        raise TimeoutError
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(10)
    except TimeoutError:
        return [1.0] * len(completions)

async def comes_back_twice(completions, **_):
    os.fork()
    return [1.0] * len(completions)

def leaves_children(completions, **_):
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,)).start()
    return [float(os.getpid())] * len(completions)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the rewards above."""
    made = tmp_path_factory.mktemp("own")
    (made / "rewards_in_a_worker.py").write_text(REWARDS)
    return made


@pytest.fixture(scope="module")
def worker():
    """One process for all tests."""
    made = Worker()
    yield made
    made.close()


def score(worker, folder, *names, timeout=60.0):
    """The values and the messages for two completions."""
    full = [f"rewards_in_a_worker.py:{name}" for name in names]
    rewards = resolve_rewards(full, (), [folder], worker)
    scores = Scorer(rewards, timeout).score(["a", "bb"], [[]] * 2, {})
    return scores.values_kb.tolist(), scores


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(("loops", "timed out"), ("computes", "timed out"), ("exits", "its process ended")),
        *(("leaves", "SystemExit: 3"), ("interrupts", "failed: KeyboardInterrupt")),
        *(("floods", "returned more than 67,108,864 bytes"), ("blocks", "timed out")),
        ("waits", "timed out"),
    ],
)
def test_a_call_ends_whatever_it_does(worker, folder, name, fault):
    """A call ends within a few seconds after its limit as one reward's fault; the next calls work."""
    score(worker, folder, "ones")
    started = time.monotonic()
    limit = 0.3 if fault == "timed out" else 60.0
    values, scores = score(worker, folder, name, timeout=limit)
    assert time.monotonic() - started < 300
    assert fault in " ".join(scores.problems) and bool(scores.failed) == bool(fault)
    values, scores = score(worker, folder, "ones", "later")
    assert values == [[1.0, 1.0], [2.0, 2.0]]
    assert all("process was restarted" in line for line in scores.problems)


@pytest.mark.parametrize(("name", "values"), [("pools", [1.0, 2.0]), ("alarms", [1.0, 1.0])])
def test_rewards_are_called_in_a_main_thread(worker, folder, name, values):
    """Time limits by signals and process pools require the main thread."""
    assert score(worker, folder, name)[0] == [values]


RUN = """
import os, sys, time
from runners.rewards.scoring import resolve_rewards
from runners.rewards.scoring import Scorer
from runners.user_code.worker import Worker

worker = Worker()
names = sys.argv[2:]
full = [f"rewards_in_a_worker.py:{name}" for name in names]
rewards = resolve_rewards(full, (), [sys.argv[1]], worker)
scorer = Scorer(rewards[:1], 60.0)
print(int(scorer.score(["a"], [[]], {}).values_kb[0, 0]), flush=True)
input()
Scorer(rewards[1:], 600.0).score(["a"], [[]], {})
"""


@pytest.mark.parametrize("blocked", ["computes", "ones"])
def test_no_process_is_left_when_the_run_is_killed(folder, blocked):
    """Neither a process that holds the GIL nor a reward's child processes remain."""
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), "leaves_children", blocked],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.stdin is not None and run.stdout is not None
    pid = int(run.stdout.readline())
    group = os.getpgid(pid)
    assert group not in (os.getpgrp(), run.pid) and len(members(group)) >= 3
    run.stdin.write(b"go on\n")
    run.stdin.close()
    if blocked != "ones":
        time.sleep(0.5)  # the call begins; it may as well be killed before
        run.kill()
    run.wait()
    wait_until(lambda: members(group) == [])


def members(group):
    """The processes of a group except zombies."""
    text = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True).stdout
    rows = [line.split() for line in text.splitlines()]
    return [pid for pid, of, state in rows if int(of) == group and not state.startswith("Z")]


def test_a_reward_that_cannot_be_loaded_is_one_line(worker, folder):
    """A missing file, a failing import and an ended process are one-line errors."""
    (folder / "ends.py").write_text("import os\nos._exit(1)\n")
    (folder / "fails.py").write_text("1 / 0\n")
    for name, line in (
        ("none.py:f", "no file at"),
        ("fails.py:f", "line 1: ZeroDivisionError"),
        ("ends.py:f", "ends.py:f: its process ended"),
        ("rewards_in_a_worker.py:lenght", "did you mean length?"),
    ):
        with pytest.raises(UserError, match=line):
            resolve_rewards([name], (), [folder], worker)
    assert score(worker, folder, "ones")[0] == [[1.0, 1.0]]


TOOLS = """
import asyncio, threading, time

def nap():
    time.sleep(300)

async def soon():
    await asyncio.sleep(0.01)

all_begun, begun, running, most = threading.Barrier(32), [], [], [0]

def meet():
    all_begun.wait()

async def meet_later():
    begun.append(1)
    while len(begun) < 32:
        await asyncio.sleep(0.001)

def count():
    running.append(1)
    most.append(len(running))
    time.sleep(0.01)
    running.pop()
    return max(most)
"""


@pytest.mark.parametrize(
    ("tool", "rows", "workers", "shown"),
    [("meet", 32, 32, {"None"}), ("meet_later", 32, 1, {"None"}), ("count", 12, 3, {"1", "2", "3"})],
)
def test_calls_of_many_rows_run_side_by_side(worker, folder, tool, rows, workers, shown):
    """Those that meet end when all have begun; no more threads run at a time than there may be workers, and
    those that hang are not waited for."""
    (folder / "meeting.py").write_text(TOOLS)
    worker.load("runners.environments.instances:load", "", ("meeting.py",), (str(folder),))
    calls, call = Calls(worker, workers=workers), "runners.environments.instances:call"
    for row in range(2 * workers):
        calls.submit(row, call, None, [("nap", {})], 100, timeout=0.1, mode=THREAD)
    assert all(outcome.timed_out for outcome in gathered(calls, 2 * workers))
    mode = TOGETHER if tool == "meet_later" else THREAD
    for row in range(rows):
        calls.submit(row, call, None, [(tool, {})], 100, timeout=HANGS, mode=mode)
    results = [result for outcome in gathered(calls, rows) for result in outcome.value]
    assert {text for _, text, *_ in results} <= shown and len(results) == rows


def test_a_hanging_plain_tool_does_not_block_coroutines_of_other_rows(worker, folder):
    """A turn may call plain and async tools."""
    (folder / "meeting.py").write_text(TOOLS)
    worker.load("runners.environments.instances:load", "", ("meeting.py",), (str(folder),))
    calls, call = Calls(worker, workers=2), "runners.environments.instances:call"
    calls.submit(0, call, None, [("soon", {}), ("nap", {})], 100, timeout=1.0, mode=THREAD)
    time.sleep(0.3)  # it naps
    calls.submit(1, call, None, [("soon", {})], 100, timeout=HANGS, mode=TOGETHER)
    assert sorted(outcome.fault for outcome in gathered(calls, 2)) == ["", "timed out after 1 s"]


def test_a_forked_child_that_comes_back_from_a_coroutine_is_ended(worker, folder):
    """Such a child would read the wake-ups of the shared event loop."""
    score(worker, folder, "ones")
    group = worker._process._process.pid
    before = members(group)
    assert score(worker, folder, "comes_back_twice")[0] == [[1.0, 1.0]]
    wait_until(lambda: members(group) == before)


def test_a_forked_child_of_the_run_leaves_the_process_alone(worker, folder):
    """A forked child neither ends the process nor keeps its pipe open."""
    score(worker, folder, "ones")
    child = os.fork()
    if child == 0:
        pipe = worker._process._process.stdin
        worker.close()
        os._exit(0 if pipe.closed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert score(worker, folder, "ones")[1].problems == []


def gathered(calls, count):
    """This number of outcomes."""
    found = {}
    while len(found) < count:
        found |= calls.collect(1)
    return found.values()

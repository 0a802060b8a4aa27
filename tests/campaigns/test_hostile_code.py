"""Tools and rewards that fork, block, exit and flood: a run never waits beyond their time limits."""

import json
import time
from pathlib import Path

import pytest

from tests.support.ranks.launching import begin
from tests.support.tiny_runs import small

ACTS = (
    "forks", "pools", "blocks", "computes", "backtracks", "exits", "crashes", "closes", "floods", "prints",
)  # fmt: skip
CODE = r'''
import ctypes, multiprocessing, os, re, time, zlib

KINDS = "@ACTS@".split()


def half(text):
    return text[: len(text) // 2]


def act(kind):
    if kind == "forks":
        if os.fork() == 0:
            time.sleep(0.2)
            os._exit(0)
    elif kind == "pools":
        with multiprocessing.Pool(2) as pool:  # by the system's default: fork on Linux before Python 3.14
            return "".join(pool.map(half, ["ab", "cd"]))
    elif kind == "blocks":
        time.sleep(600)
    elif kind == "computes":
        9 ** 9 ** 9
    elif kind == "backtracks":
        re.match("(a+)+$", "a" * 60 + "b")
    elif kind == "exits":
        os._exit(3)
    elif kind == "crashes":
        ctypes.string_at(0)
    elif kind == "closes":
        os.closerange(0, 256)
    elif kind == "floods":
        return "x" * 100_000_000
    elif kind == "prints":
        while True:
            print("y" * 1000)
    return "fine"


def kind_of(text):
    return KINDS[zlib.crc32(text.encode()) % len(KINDS)]


class Hostile:
    """An environment whose tools do what the text that they get says."""

    def reset(self, **row):
        """Begin."""

    def plain(self, text: str) -> str:
        """
        Acts.

        Args:
            text: What to do.
        """
        return act(kind_of(text))

    async def awaited(self, text: str) -> str:
        """
        Acts in the event loop.

        Args:
            text: What to do.
        """
        return act(kind_of(text))


def reward(completions, trainer_state, log_extra, **_):
    log_extra("said", [act(KINDS[trainer_state.global_step % len(KINDS)])] * len(completions))
    return [float(len(completion[0]["content"]) % 3) for completion in completions]


def sound(completions, **_):
    return [float(len(completion[0]["content"]) % 5) for completion in completions]
'''


def left_of(folder: Path) -> list[str]:
    """The commands of processes that inherited this run's environment."""
    found, mark = [], f"HOSTILE={folder}".encode()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (place / "environ").read_bytes():
                found.append((place / "cmdline").read_bytes().decode("utf-8", "replace"))
        except OSError:  # it has ended, or is another user's
            continue
    return found


@pytest.mark.parametrize(
    ("acts", "schedule", "ranks"), [(ACTS[::2], "together", 2), (ACTS[1::2], "arrival", 1)]
)
def test_a_run_ends_with_all_its_updates(tmp_path, acts, schedule, ranks):
    """Half of the kinds each: every line is logged, and no process is left."""
    folder, updates = tmp_path, len(acts)
    (folder / "hostile.py").write_text(CODE.replace("@ACTS@", " ".join(acts)))
    config = folder / "train.toml"
    config.write_text(
        small(
            run={"name": "r", "output_dir": str(folder)},
            data={"nudge": ""},
            env={"factory": "hostile.py:Hostile", "max_turns": 3, "timeout": 1.0, "schedule": schedule},
            rollout={"num_generations": 2, "max_new_tokens": 64, "stop": list("e1=37"), "temperature": 2.0},
            reward={
                "functions": ["hostile.py:reward", "hostile.py:sound"],
                "timeout": 1.0, "stop_if_all_fail": False,
            },
            optim={"max_steps": updates},
            eval={"samples": 2},
            log={"report": False},
        )
    )  # fmt: skip
    started = time.monotonic()
    run = begin(ranks, folder / "ranks", [str(config)], "calls", HOSTILE=str(folder))
    said = "\n".join(line for line in run.end().splitlines() if not line.endswith("yyy"))
    assert time.monotonic() - started < 60 + updates * 30
    assert (folder / "r/final").is_dir() and "Traceback" not in said, said[-3000:]
    log = [json.loads(line) for line in (folder / "r/training_log.jsonl").read_text().splitlines()]
    assert [line["update"] for line in log if "loss" in line] == list(range(1, updates + 1))
    end = time.monotonic() + 5  # a process takes a moment to end
    while (left := left_of(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []

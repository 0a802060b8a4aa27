"""Runs on several ranks, as processes under mlx.launch, and their configs."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from tests.support.processes.waiting import HANGS
from tests.support.tiny_runs import small

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[3]


def free_ports(number: int) -> int:
    """The first of this many consecutive ports that are unused."""
    chance = random.Random(os.getpid() + time.monotonic_ns())  # others look for ports, too
    for _ in range(1000):
        start = chance.randrange(20_000, 32_000)
        try:
            for port in range(start, start + number):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return start
        except OSError:
            continue
    raise RuntimeError("no free ports")

    # fmt: on


@attrs.define
class Launched:
    """A running `mlx.launch`. Its standard input stays open, because it would spin at the end of it."""

    process: subprocess.Popen
    output: Path
    folder: Path  # of the ranks' own files
    ranks: int

    def pid(self, rank: int) -> int | None:
        """A rank's process; None before it has begun."""
        file = self.folder / f"{rank}.pid"
        return int(file.read_text()) if file.exists() else None

    def said(self) -> str:
        """All that was printed so far."""
        return self.output.read_text(errors="replace")

    def wait_until(self, holds: Callable[[], bool], seconds: float = HANGS) -> bool:
        """Whether the condition came to hold before the launcher's end."""
        latest = time.monotonic() + seconds
        while time.monotonic() < latest:
            if holds():
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.002)
        raise RuntimeError(f"not after {seconds:.0f} s: {self.said()[-2000:]}")

    def end(self, seconds: float = HANGS) -> str:
        """Waits for the launcher and its ranks, and returns their output. Kills them after `seconds`."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"no end after {seconds:.0f} s: {self.said()[-2000:]}") from None
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.said()

    def kill(self) -> None:
        """Ends all remaining processes."""
        for rank in range(self.ranks):
            if (pid := self.pid(rank)) and is_running(pid):
                os.kill(pid, 9)
        self.process.kill()
        self.process.wait()


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(shown.stdout.strip()) and not shown.stdout.startswith("Z")


def begin(ranks: int, folder: Path, options: Sequence[str], *hooks: str, **environ: str) -> Launched:
    """`grpo-run OPTIONS` on this many ranks, with hooks of `rank_process`; `folder` has the ranks' files."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (*folder.glob("*.pid"), *folder.glob("*.digests")):
        file.unlink()
    output = folder / "output.txt"
    launch = [BIN / "mlx.launch", "-n", ranks, "--backend", "ring", "--starting-port", free_ports(ranks)]
    rank = [sys.executable, "-m", "tests.support.ranks.rank_process", folder, *hooks, "--", *options]
    with output.open("w") as stream:
        process = subprocess.Popen(
            [*map(str, [*launch, "--", *rank])],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        )
    return Launched(process, output, folder, ranks)


LETTERS = '''"""How many different characters a completion has; a group may be alike, and is drawn again."""

import zlib


def letters(completions, **_):
    return [float(len(set(completion[0]["content"]))) // 2 for completion in completions]


def sums(completions, **_):
    return [zlib.crc32(completion[0]["content"].encode()) % 97 / 97 for completion in completions]
'''


def config_writer(folder: Path) -> Callable[..., Path]:
    """A function that writes configs of small runs rewarded by `LETTERS`, and returns their paths."""
    (folder / "letters.py").write_text(LETTERS)

    def make(name: str, **tables) -> Path:
        path = folder / f"{name}.toml"
        settings = {
            "rollout": {"max_new_tokens": 8, "launch": "eval", "check_every": 8, "max_batch": 64},
            "reward": {"functions": ["letters.py:letters"]},
            "optim": {"batch_size": 3, "max_steps": 4, "learning_rate": 1e-3},
            "eval": {"samples": 3, "at_start": False},
            "checkpoint": {"every": 1, "keep_last": 0},
            "log": {"report": False},
            "system": {"compile": False},
        }
        merged = {key: settings.get(key, {}) | tables.get(key, {}) for key in {**settings, **tables}}
        run = {"name": name, "output_dir": str(folder / "outputs"), **merged.pop("run", {})}
        path.write_text(small(run=run, **merged))
        return path

    return make

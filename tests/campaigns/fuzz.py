"""Files as nobody means them: mutated and invented, through the functions that read them.

    python -m tests.campaigns.fuzz --inputs 10000 [--target NAME] [--seed N]

Whatever a file holds, reading it gives a value or a UserError: any other exception, a crash, more than five
seconds, or a file touched outside of the input's own folder is a failure. Each kind of file is read in a
process of its own, so that one which MLX or Python cannot survive is found too, with the input that did it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from hypothesis import HealthCheck, given, seed, settings

from runners.machine.startup import load_blas

load_blas()

from runners.errors import UserError  # noqa: E402
from tests.campaigns.fuzz_targets import TARGETS  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 5.0  # for one input
# Times as long: two seconds of computing in another process, on a busy machine.
PATIENCE = {"templates": 24, "peft": 24}
MEMORY = 8 << 30  # bytes of a process's address space
_WRITING = ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate")
_RUNNING = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"}
_RUNNING |= {"socket.connect", "socket.getaddrinfo"}
# What processes with limits are started for: a tokenizer's first use, regular expressions of a file.
_BOUNDED = ("first_use:first_use", "json_keys:first_patterns")


class Watchdog:
    """Records files that are changed outside of a folder, and commands other than our limited processes."""

    def __init__(self, folder: Path) -> None:
        self.allowed = (str(folder.resolve()), "/dev/", str(ROOT / ".hypothesis"))
        self.found: list[str] = []
        self.on = False
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        bounded = any(function in repr(arguments) for function in _BOUNDED)
        if event in _RUNNING and not bounded:
            self.found.append(f"{event} {arguments!r:.200}")
        elif event in _WRITING and isinstance(path := arguments[0], str | bytes | os.PathLike):
            if event == "open" and not _writes(*arguments[1:3]):
                return
            whole = os.path.realpath(os.fsdecode(path))
            if not whole.startswith(self.allowed) and "__pycache__" not in whole:
                self.found.append(f"{event} {whole}")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block; what was found is an error at its end."""
        self.found, self.on = [], True
        try:
            yield
        finally:
            self.on = False
        if self.found:
            raise AssertionError(f"outside of the folder: {self.found}")


def _writes(mode: Any = None, flags: Any = None) -> bool:
    if isinstance(mode, str):
        return bool(set(mode) & set("wax+"))
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


class TooLong(BaseException):
    """An input took too long; no Exception, as those of other people's code become a UserError."""


def _too_long(*_: object) -> None:
    raise TooLong


def run_target(name: str, inputs: int, number: int, folder: Path) -> None:
    """Feeds so many inputs to one target, in this process; raises at the first that fails, made small."""
    place = folder / "input"
    place.mkdir(parents=True)
    os.environ["GRPO_FN_CACHE"] = str(folder / "cache")
    strategy, feed_one, valid = TARGETS[name](place)
    feed_one(valid)  # imports write caches, which is nothing that an input did
    watchdog = Watchdog(folder)
    counts = {"taken": 0, "refused": 0}
    signal.signal(signal.SIGALRM, _too_long)

    usual: Any = {"deadline": None, "database": None, "print_blob": False}
    usual["suppress_health_check"] = list(HealthCheck)

    @seed(number)
    @settings(max_examples=inputs, **usual)
    @given(strategy)
    def feed(value: Any) -> None:
        (folder / "last").write_bytes(repr(value).encode("utf-8", "backslashreplace"))
        signal.setitimer(signal.ITIMER_REAL, SECONDS * PATIENCE.get(name, 1))
        try:
            with watchdog.watching():
                feed_one(value)
            counts["taken"] += 1
        except UserError as error:
            assert str(error).strip() and "Traceback" not in str(error)
            counts["refused"] += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    feed()
    taken, refused = counts.values()
    print(f"{name}: {taken + refused:,} inputs, {taken:,} taken, {refused:,} refused")


def fuzz(names: list[str], inputs: int, number: int) -> str:
    """The output of a process that feeds this many inputs to each target; AssertionError if one fails."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        words = ["--inside", folder, "--inputs", str(inputs), "--seed", str(number)]
        words += [word for name in names for word in ("--target", name)]
        patience = 600 + inputs * sum(PATIENCE.get(name, 1) for name in names)
        command = [sys.executable, "-m", "tests.campaigns.fuzz", *words]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=patience, check=False
        )
        lasts = sorted(Path(folder).glob("*/last"), key=lambda file: file.stat().st_mtime)
        last = lasts[-1].read_text()[:2000] if lasts else "none"
    faults = f"{names}: exit code {done.returncode}; last input {last}\n{done.stderr[-6000:]}"
    assert not done.returncode, faults
    return done.stdout


@click.command()
@click.option("--inputs", default=10_000, show_default=True, help="Of each target; of templates a tenth.")
@click.option("--target", "targets", multiple=True, type=click.Choice(list(TARGETS)), help="[all]")
@click.option("--seed", "number", default=0, show_default=True)
@click.option("--inside", type=click.Path(path_type=Path), hidden=True)
def main(inputs: int, targets: tuple[str, ...], number: int, inside: Path | None) -> None:
    """Feed made-up files to their readers. Exit code 1 where anything failed."""
    if inside is None:
        for name in targets or TARGETS:
            count = max(inputs // 10, 1) if name == "templates" else inputs  # a process each
            print(fuzz([name], count, number), end="", flush=True)
        return
    if sys.platform == "linux":  # an input that asks for more is refused, or ends this process alone
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for name in targets:
        run_target(name, inputs, number, inside / name)


if __name__ == "__main__":
    main()

"""Limits of this process under which MLX or mlx-lm hang, crash or fail without saying why."""

from __future__ import annotations

import os
import resource
import sys
import threading
from pathlib import Path

from runners.errors import UserError, gigabytes

_ADDRESSES = (5 << 28, 1 << 27)  # bytes that the libraries map: once, and for each core's thread
_FILES = 4096  # mlx-lm sets this hard limit of open files, and fails if it cannot
_THREADS = 8  # of MLX and of a run, beside those that OpenBLAS and tokenizers start for each core
_GROUPS = Path("/proc/self/cgroup")
_GROUP_ROOT = Path("/sys/fs/cgroup")


def check_limits(cores: int) -> None:
    """Raises UserError if a limit is too low for MLX on so many cores. Does nothing once MLX is imported."""
    if "mlx.core" in sys.modules:
        return
    most, least = resource.getrlimit(resource.RLIMIT_AS)[0], _ADDRESSES[0] + cores * _ADDRESSES[1]
    if most != resource.RLIM_INFINITY and most < least:
        raise UserError(
            f"expected {gigabytes(least)} of address space for {cores} cores, found the limit "
            f"{gigabytes(most)}; `ulimit -v unlimited` removes it"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _FILES:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, _FILES))
        except (ValueError, OSError):
            raise UserError(
                f"expected a hard limit of {_FILES:,} open files, as mlx-lm sets it, found {hard:,}; "
                f"`ulimit -Hn` shows it"
            ) from None
    _check_threads(2 * cores + _THREADS)


def _check_threads(count: int) -> None:
    end, started = threading.Event(), []
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:
        raise UserError(
            f"expected room for {count} threads, found it for {len(started)}; `ulimit -u`, or the control "
            "group's pids.max, limits them"
        ) from None
    finally:
        end.set()
        for thread in started:
            thread.join()


def memory_limit(groups: Path = _GROUPS, root: Path = _GROUP_ROOT) -> int | None:
    """The least bytes that the control groups of this process (version 1 or 2) allow; None: no limit."""
    found = []
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.is_file() else ():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, file = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        place = base / os.path.normpath(name).lstrip("/")
        for folder in (place, *place.parents):
            if folder.is_relative_to(base) and (folder / file).is_file():
                text = (folder / file).read_text(encoding="utf-8").strip()
                found += [int(text)] if text.isdigit() else []
    return min(found, default=None)

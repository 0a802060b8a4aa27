"""`grpo-run` that lingers in one of its functions, for tests that send it a signal there.

    python -m tests.support.processes.staged_run MODULE:NAME CALL SECONDS FILE -- CONFIG [OPTION …]

The CALL-th call of the function makes FILE, takes SECONDS longer, and does what it does.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from pathlib import Path
from typing import Any


def linger(target: str, call: int, seconds: str, file: Path) -> None:
    """Puts another function in the place of `target`, an attribute of a module or of a class in it."""
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    real, calls = getattr(owner, name), []

    @functools.wraps(real)
    def lingering(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            file.touch()
            until = time.monotonic() + float(seconds)
            while time.monotonic() < until:
                time.sleep(0.01)
        return real(*args, **kwargs)

    setattr(owner, name, lingering)


def main() -> None:
    """Installs the function, and is `grpo-run` from here on."""
    target, call, seconds, file = sys.argv[1:5]
    sys.argv = ["grpo-run", *sys.argv[6:]]
    import grpo_fn  # noqa: F401 (before MLX)
    from runners.cli import run_command

    linger(target, int(call), seconds, Path(file))
    run_command()


if __name__ == "__main__":
    main()

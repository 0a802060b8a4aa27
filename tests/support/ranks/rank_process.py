"""`grpo-run` as one rank among those that `mlx.launch` starts, for tests that have to reach into it.

    mlx.launch -n 2 -- python -m tests.support.ranks.rank_process FOLDER [HOOK …] -- CONFIG [OPTION …]

FOLDER gets `R.pid` before anything else is done, so that others can signal rank R; `{rank}` in an option is
the rank. Hooks change what a rank does: "digests" writes a line for the weights after each update to
`R.digests`; "memory" makes the third gradient step of rank 1 run out of memory; "linger RANKS MODULE:NAME
CALL SECONDS" makes the CALL-th call of the function on these ranks, such as 01, write `R.there`, take SECONDS
longer, and do what it does; with "calls" each turn of the model is a tool call. A process without a launcher
is rank 0.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any, cast


def main() -> None:
    """Writes the process's number, installs the hooks, and is `grpo-run` from here on."""
    folder, rank = Path(sys.argv[1]), os.environ.get("MLX_RANK", "0")
    half = folder / f"{rank}.pid.half"
    half.write_text(str(os.getpid()))
    half.rename(folder / f"{rank}.pid")
    at = sys.argv.index("--")
    hooks = sys.argv[2:at]
    sys.argv = ["grpo-run", *(word.replace("{rank}", rank) for word in sys.argv[at + 1 :])]
    from runners.cli import run_command

    if hooks:
        import grpo_fn  # noqa: F401 (before MLX)

        if "digests" in hooks:
            _write_digests(folder / f"{rank}.digests")
        if "linger" in hooks:
            ranks, target, call, seconds = hooks[hooks.index("linger") + 1 :][:4]
            if rank in ranks:
                _linger(target, int(call), seconds, folder / f"{rank}.there")
        if "memory" in hooks and rank == "1":
            _run_out_of_memory(3)
        if "calls" in hooks:
            _call_tools()
    run_command()


def _linger(target: str, call: int, seconds: str, file: Path) -> None:
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


def _write_digests(file: Path) -> None:
    """After each update a line: the digest of all weights and of the whole optimizer's step."""
    import hashlib

    from grpo_fn.trees import named_leaves
    from runners.training import train

    real = train.sync

    def sync(plan: Any, state: Any) -> Any:
        digest = hashlib.sha256()
        for name, leaf in sorted(named_leaves(state.train.params).items()):
            digest.update(name.encode())
            digest.update(bytes(memoryview(cast(Any, leaf))))
        with file.open("a") as stream:
            stream.write(f"{state.update} {digest.hexdigest()}\n")
        return real(plan, state)

    train.sync = sync


def _call_tools() -> None:
    """Each turn of the model is a call, in turns of the tools `plain` and `awaited`."""
    from runners.environments.tool_calls import CallReader, ToolCall

    def read(self: Any, text: str) -> tuple[str, list[ToolCall]]:
        name = ("plain", "awaited")[len(text) % 2]
        return text, [ToolCall(name, {"text": text})]

    CallReader.read = read


def _run_out_of_memory(call: int) -> None:
    """The gradient step's `call`-th call fails as MLX's allocator does."""
    from runners.training import gradients

    own, calls = gradients.pieces_of_rank, []

    def failing(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return own(*given)

    gradients.pieces_of_rank = failing


if __name__ == "__main__":
    main()

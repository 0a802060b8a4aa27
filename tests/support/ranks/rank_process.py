"""`grpo-run` as one rank among those that `mlx.launch` starts, for tests that have to reach into it.

    mlx.launch -n 2 -- python -m tests.support.ranks.rank_process FOLDER [HOOK …] -- CONFIG [OPTION …]

FOLDER gets `R.pid` before anything else is done, so that others can signal rank R; `{rank}` in an option is
the rank. Hooks change what a rank does: "digests" writes a line for the weights after each update to
`R.digests`; "memory" makes the third gradient step of rank 1 run out of memory; "loading" makes a rank
write `R.loading` when it is about to load the model, and wait there until there is a file `go`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, cast


def main() -> None:
    """Writes the process's number, installs the hooks, and is `grpo-run` from here on."""
    folder, rank = Path(sys.argv[1]), os.environ["MLX_RANK"]
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
        if "loading" in hooks:
            _load_later(folder / f"{rank}.loading", folder / "go")
        if "memory" in hooks and rank == "1":
            _run_out_of_memory(3)
    run_command()


def _write_digests(file: Path) -> None:
    """After each update a line: the digest of all weights and of the whole optimizer's step."""
    import hashlib

    from grpo_fn.trees import named_leaves
    from runners.training.steps import TrainSteps

    finish = TrainSteps.finish_update

    def finish_update(self: Any) -> None:
        digest = hashlib.sha256()
        for name, leaf in sorted(named_leaves(self.state.params).items()):
            digest.update(name.encode())
            digest.update(bytes(memoryview(cast(Any, leaf))))
        with file.open("a") as stream:
            stream.write(f"{self.at.update} {digest.hexdigest()}\n")
        finish(self)

    TrainSteps.finish_update = finish_update


def _load_later(file: Path, go: Path) -> None:
    """The model's loading writes a file, and waits for another."""
    import time

    from runners.training import setup

    load = setup.load_model

    def load_model(*args: Any, **kwargs: Any) -> Any:
        file.touch()
        while not go.exists():
            time.sleep(0.002)
        return load(*args, **kwargs)

    setup.load_model = load_model


def _run_out_of_memory(call: int) -> None:
    """The gradient step's `call`-th call fails as MLX's allocator does."""
    from runners.training.gradients import Gradients

    own, calls = Gradients._own, []

    def failing(self: Any, pieces: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return own(self, pieces)

    Gradients._own = failing


if __name__ == "__main__":
    main()

"""Lists the runs in a folder: progress, results, and how to continue each. Nothing is changed."""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import attrs

import grpo_fn  # noqa: F401 (before MLX: it loads the BLAS)
from runners.checkpoints.run_folder import TRAINER_STATE, checkpoint_folders, interrupted
from runners.config.recorded import Recorded, recorded_in
from runners.errors import UserError
from runners.files.json_files import finite_number, whole_number
from runners.files.json_lines import LineFile
from runners.files.run_files import LOCK, METRICS, RESOLVED

DEPTH = 4  # a run's name may be a path
State = Literal["running", "finished", "interrupted", "stopped"]


@attrs.define
class RunSummary:
    """The facts in one run's folder. None: the folder does not tell."""

    folder: str
    state: State  # interrupted: has a checkpoint to resume from; stopped: has none
    update: int = 0  # the last one in the log
    batch_steps: int | None = None  # planned ones, if optim.max_steps gives them
    batch_step: int = 0
    first_em: float | None = None  # exact match, 0 to 1
    last_em: float | None = None
    first_eval_reward: float | None = None  # the run's own rewards on held-out problems
    last_eval_reward: float | None = None
    reward: float | None = None  # of the last update
    seconds: float = 0.0  # spent in updates and evaluations
    changed: float = 0.0  # when its log was written last, seconds since 1970
    go_on: str = ""  # a command; "" while it runs


def find_runs(folder: Path) -> list[RunSummary]:
    """The runs in a folder and below it, the last changed one first. UserError if it does not exist."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder, want one that holds runs, such as outputs")
    return sorted(map(summarize, _folders(folder, DEPTH)), key=lambda run: (-run.changed, run.folder))


def summarize(folder: Path) -> RunSummary:
    """One run. Lines of its log that are not JSON are skipped: a run may be writing there."""
    config, state = recorded_in(folder), _state(folder)
    run = RunSummary(str(folder), state, go_on=_advice(folder, state, config))
    run.batch_steps = whole_number(config.get("optim", "max_steps")) or None
    for line in LineFile(folder / METRICS).read():
        step = whole_number(line.get("update"))
        if "time/eval" in line and "step_time" not in line:
            em, reward = finite_number(line.get("em")), finite_number(line.get("eval/reward"))
            run.first_em = em if run.first_em is None else run.first_em
            run.last_em = run.last_em if em is None else em
            run.first_eval_reward = reward if run.first_eval_reward is None else run.first_eval_reward
            run.last_eval_reward = run.last_eval_reward if reward is None else reward
            run.seconds += finite_number(line.get("time/eval")) or 0.0
        else:
            # With log.every above 1 a line also counts for the updates before it.
            run.seconds += (finite_number(line.get("step_time")) or 0.0) * max(step - run.update, 1)
            run.reward = finite_number(line.get("reward"))
        run.update = max(run.update, step)
        run.batch_step = max(run.batch_step, whole_number(line.get("batch_step")))
    states = [path / TRAINER_STATE for path in checkpoint_folders(folder).values()]
    for path in (folder / METRICS, folder / RESOLVED, *states):
        with suppress(OSError):
            run.changed = max(run.changed, path.stat().st_mtime)
    return run


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    """Folders of runs; links are not followed, and runs are not searched inside."""
    if (folder / RESOLVED).is_file():
        yield folder
    elif depth:
        with suppress(OSError):
            for path in sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()):
                yield from _folders(path, depth - 1)


def _state(folder: Path) -> State:
    if _is_locked(folder / LOCK):
        return "running"
    if interrupted(folder) is not None:
        return "interrupted"
    return "finished" if (folder / "final" / "config.json").is_file() else "stopped"


def _is_locked(file: Path) -> bool:
    """Whether a process has the run's lock. The check takes a shared lock for an instant."""
    try:
        number = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(number)
    return False


def _advice(folder: Path, state: State, config: Recorded) -> str:
    if state == "running":
        return ""
    if state == "finished":
        return shlex.join(["grpo", "chat", str(folder)])
    command = ["grpo-run", str(folder / RESOLVED)]
    output, name = config.get("run", "output_dir"), config.get("run", "name")
    if output and name and Path(output, name).resolve() != folder.resolve():
        # The run was started elsewhere, or its folder was moved.
        command += ["--set", f"run.output_dir={folder.parent}", "--set", f"run.name={folder.name}"]
    return shlex.join([*command, "--resume"] if state == "interrupted" else command)

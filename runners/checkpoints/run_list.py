"""Lists the runs in a folder: progress, results, and how to resume each run. Nothing is changed."""

import shlex
from pathlib import Path

import attrs

import grpo_fn  # noqa: F401 (before MLX: it loads the BLAS)
from runners.checkpoints.run_folder import interrupted
from runners.config.loading import recorded_in
from runners.errors import UserError
from runners.files.json_files import whole_number
from runners.files.run_files import METRICS, RESOLVED
from runners.report.run_record import RunRecord, is_running


@attrs.frozen
class RunSummary:
    """Facts from a run's folder. A fact is None if the folder does not contain it."""

    folder: str
    state: str  # running; finished; interrupted: has a checkpoint to resume from; stopped: has none
    update: int  # the last update in the log
    em: float | None  # of the last evaluation: exact match, 0 to 1
    eval_reward: float | None  # the run's own rewards on held-out problems
    reward: float | None  # of the last update
    changed: float  # last change of its log, in seconds since 1970
    worse: str  # the metric that is below its best; "" if there is none
    go_on: str  # the command that resumes it; "" while it runs


def find_runs(folder: Path) -> list[RunSummary]:
    """Returns the runs in a folder and its subfolders, most recent first. Raises UserError if the
    folder does not exist.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder}: there is no such folder; expected one that contains runs, such as outputs"
        )
    found = {file.parent for file in folder.rglob(RESOLVED) if file.is_file()}
    return sorted(map(summarize, found), key=lambda run: (-run.changed, run.folder))


def summarize(folder: Path) -> RunSummary:
    """Collects the facts about a run. Lines in its log that are not JSON are skipped, because a run
    may be writing them.
    """
    record = RunRecord(folder)
    state = "stopped"
    if is_running(folder):
        state = "running"
    elif interrupted(folder) is not None:
        state = "interrupted"
    elif (folder / "final" / "config.json").is_file():
        state = "finished"
    written = filter(Path.is_file, (folder / METRICS, folder / RESOLVED))
    return RunSummary(
        folder=str(folder),
        state=state,
        update=whole_number(record.last("update")),
        em=record.last("em"),
        eval_reward=record.last("eval/reward"),
        reward=record.last("reward"),
        changed=max(path.stat().st_mtime for path in written),
        worse=record.worse,
        go_on=_advice(folder, state),
    )


def _advice(folder: Path, state: str) -> str:
    if state == "running":
        return ""
    if state == "finished":
        return shlex.join(["grpo", "chat", str(folder)])
    command = ["grpo-run", str(folder / RESOLVED)]
    config = recorded_in(folder).get("run", {})
    output = config.get("output_dir")
    name = config.get("name")
    if output and name and Path(output, name).resolve() != folder.resolve():
        # The run was started elsewhere, or its folder was moved.
        command += ["--set", f"run.output_dir={folder.parent}", "--set", f"run.name={folder.name}"]
    return shlex.join([*command, "--resume"])

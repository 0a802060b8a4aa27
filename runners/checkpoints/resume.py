"""Resumes from a checkpoint: finds and checks it, and compares the checkpoint's config and inputs
with the current ones.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs

from runners.checkpoints.checkpoint import TrainerState, read_trainer_state
from runners.checkpoints.manifest import check_manifest, newest_whole
from runners.checkpoints.run_folder import checkpoint_folders, interrupted
from runners.checkpoints.run_inputs import HELD_OUT, START
from runners.config.loading import Config, recorded_in
from runners.config.names import EMBEDDED
from runners.config.sections import ModelConfig
from runners.errors import UserError, show
from runners.files.run_files import COMPLETIONS, METRICS
from runners.report.run_record import flattened

# Keys that may differ, because they change neither weights nor completions.
HARMLESS = {
    *("checkpoint", "log", "ranks", "watch", "stop", "run.name", "run.output_dir", "run.overwrite"),
    *("answer.partial_sandbox", "eval.every", "eval.at_start", "optim.max_bad_updates"),
    "reward.stop_if_all_fail",
    *("system.memory_limit_gb", "system.collective_timeout", "system.check_model"),
}
# Keys that the config may leave to the machine; a resumed run takes their values from the first
# run.
DECIDED = ("launch", "max_batch")
LEFT_OPEN = (0, "auto")  # values that leave the decision to the model or the machine


@attrs.frozen
class Origin:
    """A checkpoint to resume from, after every file has been checked."""

    folder: Path
    facts: TrainerState


def find_origin(folder: Path, wish: Path | None, note: Callable[[str], None]) -> Origin | None:
    """Returns the checkpoint to resume from, or None if the run's folder has none yet.

    Args:
        folder: the run's folder.
        wish: a checkpoint or a folder that contains checkpoints. None means the run's own
            checkpoints.
        note: receives a message for each damaged checkpoint, which is skipped.

    Raises UserError if the named checkpoint or all checkpoints are damaged, or if the checkpoint's
    format version differs.
    """
    searched = folder if wish is None else wish
    found = len(checkpoint_folders(searched))
    if wish is not None and not found:
        check_manifest(wish)
        return Origin(wish, read_trainer_state(wish))
    path = newest_whole(searched, note)
    if path is not None:
        return Origin(path, read_trainer_state(path))
    if found:
        raise UserError(
            f"{searched}: none of its {found} checkpoints is complete; --overwrite starts over"
        )
    if (folder / "final").exists():
        raise UserError(
            f"{folder} contains a finished run without checkpoints; --overwrite starts over"
        )
    note(f"{searched} contains no checkpoint yet: the run starts from the beginning")
    return None


def first_start(origin: Origin | None) -> datetime:
    """Returns the time when a run was first started, if its chat template contains the date. For
    other runs and for new runs, returns the current time.
    """
    with suppress(ValueError):
        return datetime.fromisoformat(str(origin.facts.inputs.get(START)) if origin else "")
    return datetime.now().replace(microsecond=0)


def check_free(folder: Path, key: str, *, replace_finished: bool = False) -> None:
    """Raises UserError if the folder contains a run. With `replace_finished`, only an interrupted
    run is an error.

    `key` is the config key for the message.
    """
    found = "an interrupted run"
    name = interrupted(folder)
    if name is None and not replace_finished:
        found = "a run"
        left = [folder / METRICS, folder / COMPLETIONS, folder / "final"]
        left += checkpoint_folders(folder).values()
        name = next((path.name for path in left if path.exists()), None)
    if name is not None:
        raise UserError(
            f"{key}: {folder} already contains {found} ({name}); --resume continues it, "
            "--overwrite starts over, and a different run.name keeps it"
        )


def compare_config(
    config: Config, origin: Origin, note: Callable[[str], None], *, allowed: bool
) -> None:
    """Reports the keys whose values differ from the checkpoint's.

    Raises UserError if weights or completions depend on one of these keys, unless `allowed`.
    """
    defaults = flattened(Config(model=ModelConfig(path=EMBEDDED)).to_dict())
    was = flattened(origin.facts.config)
    now = flattened(config.to_dict())
    # For keys that the config left open, config.resolved.json contains the values that were used.
    resolved = flattened(recorded_in(origin.folder.parent))
    changes: dict[str, str] = {}
    for key in sorted(was.keys() | now.keys()):
        before = was.get(key, defaults.get(key))
        after = now.get(key, defaults.get(key))
        chosen = before in LEFT_OPEN and after == resolved.get(key, before)
        if before not in (after, {}) and not chosen:
            changes[key] = _change(key, before, after)
    matter = [
        change for key, change in changes.items() if not HARMLESS & {key, key.partition(".")[0]}
    ]
    if matter and not allowed:
        raise UserError(
            f"the config differs from {origin.folder}: {', '.join(matter)}; "
            f"--allow-config-change continues anyway"
        )
    if changes:
        note(f"the config differs from {origin.folder}: {', '.join(changes.values())}")


def compare_inputs(
    inputs: Mapping[str, Any],
    computing: Mapping[str, Any],
    origin: Origin,
    note: Callable[[str], None],
    *,
    allowed: bool,
) -> None:
    """Reports inputs that differ from the checkpoint's (see `run_inputs`), and changed values in
    `Platform.arithmetic`.

    Raises UserError if weights or completions depend on such an input, unless `allowed`.
    """
    found = [name for name, value in inputs.items() if origin.facts.inputs.get(name) != value]
    line = f"{', '.join(found)}: changed since {origin.folder} was trained"
    if {*found} - {HELD_OUT} and not allowed:
        raise UserError(f"{line}; --allow-config-change continues anyway")
    if found:
        note(line)
    earlier = origin.facts.arithmetic
    rows = [
        _change(key, earlier.get(key), now)
        for key, now in computing.items()
        if earlier.get(key) != now
    ]
    if rows:
        note(
            f"{origin.folder} was computed with a different {', '.join(rows)}: results will "
            f"differ in the last bits from an uninterrupted run's"
        )


def _change(name: str, was: Any, now: Any) -> str:
    return f"{name} (was {show(was)}, is {show(now)})"


def earlier_decisions(config: Config, origin: Origin) -> dict[str, Any] | None:
    """Returns the values that an earlier process chose for this config, or None if the
    corresponding keys of [rollout] have changed.
    """
    asked = origin.facts.config.get("rollout")
    same = isinstance(asked, Mapping) and decisions(config).items() <= asked.items()
    return attrs.asdict(origin.facts.decided) if same else None


def decisions(config: Config) -> dict[str, Any]:
    """Reads the values that `earlier_decisions` returns from a complete config."""
    return {name: getattr(config.rollout, name) for name in DECIDED}

"""Going on from a checkpoint: which one, whether it is whole and belongs to this config, and its values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from runners.checkpoints.manifest import Damaged, check_manifest
from runners.checkpoints.run_folder import holds_a_run, interrupted
from runners.checkpoints.snapshot import TRAINER_STATE, checkpoint_folders
from runners.checkpoints.state_files import STATE_FILE
from runners.config.loading import RESOLVED, Config
from runners.config.sections import EMBEDDED, ModelConfig
from runners.data.prompts import Example
from runners.errors import UserError, show
from runners.files.json_files import read_json

# What may differ without a word: it changes neither weights nor completions.
HARMLESS = (
    "run.name",
    "run.output_dir",
    "run.overwrite",
    "eval.every",
    "eval.at_start",
    "checkpoint",
    "log",
    "watch",
    "stop",
    "optim.max_bad_updates",
    "optim.shard",
    "reward.stop_if_all_fail",
    "system.memory_limit_gb",
    "system.collective_timeout",
    "system.check_model",
)
# Of a table [judge.NAME], what changes no verdict that comes.
HARMLESS_OF_JUDGES = (
    "api_key_env", "concurrency", "timeout", "batch_timeout", "retries", "cache", "price_in", "price_out",
    "batch_tokens",
)  # fmt: skip
# What the config may leave to the machine, and a resumed run takes over from the first one.
DECIDED = ("quantization", "storage", "launch", "max_batch")
LEFT_OPEN = (0, "auto")  # what such a key holds, and one that the model or the machine decides
Note = Callable[[str], None]


@attrs.frozen
class Origin:
    """A checkpoint to resume from, checked file by file."""

    folder: Path
    step: int
    facts: dict[str, Any]  # trainer_state.json

    def table(self, name: str) -> dict[str, Any]:
        """A table of the facts; UserError where there is none."""
        found = self.facts.get(name)
        if not isinstance(found, dict):
            raise UserError(
                f"{self.folder / TRAINER_STATE}: {name}: found {show(found)}, wanted a JSON object"
            )
        return found


def find_origin(folder: Path, wish: Path | None, note: Note) -> Origin | None:
    """The checkpoint that a run goes on from, or None where the run's folder has none yet.

    Args:
        folder: the run's.
        wish: a checkpoint, or a folder with checkpoints; None: the run's own.
        note: is told of damaged ones, which are passed over for the one before.

    Raises UserError: the checkpoint that was named is damaged, all of them are, or one is of another version.
    """
    if wish is not None and not checkpoint_folders(wish):
        check_manifest(wish, (TRAINER_STATE, STATE_FILE))
        return _opened(wish)
    searched = folder if wish is None else wish
    damaged: list[Damaged] = []
    for path in reversed(checkpoint_folders(searched).values()):
        try:
            check_manifest(path, (TRAINER_STATE, STATE_FILE))
        except Damaged as error:
            damaged.append(error)
            note(f"{error}; {path.name} is passed over")
            continue
        return _opened(path)
    if damaged:
        raise UserError(
            f"{searched}: none of its {len(damaged)} checkpoints is whole; --overwrite starts over"
        )
    if (folder / "final").exists():
        raise UserError(f"{folder} holds a finished run without checkpoints; --overwrite starts over")
    note(f"{searched} has no checkpoint yet: the run starts from the beginning")
    return None


def check_free(folder: Path, key: str, *, replace_finished: bool = False) -> None:
    """Raises UserError where the folder holds a run, or (with `replace_finished`) an interrupted one.

    `key` is the config's, for the message.
    """
    checkpoint = interrupted(folder)
    name = checkpoint or (None if replace_finished else holds_a_run(folder))
    if name:
        found = "an interrupted run" if checkpoint else "a run already"
        raise UserError(
            f"{key}: {folder} holds {found} ({name}); --resume continues it, --overwrite starts over, "
            "another run.name leaves it alone"
        )


def differences(config: Config, origin: Origin) -> list[tuple[str, str, str]]:
    """The keys in which the config differs from the checkpoint's: name, was, is."""
    defaults = _flat(Config(model=ModelConfig(path=EMBEDDED)).to_dict())
    was, now = _flat(origin.table("config")), _flat(config.to_dict())
    resolved = _resolved(origin)
    found = []
    for key in sorted(was.keys() | now.keys()):
        before, after = was.get(key, defaults.get(key)), now.get(key, defaults.get(key))
        # What the run's config left open, its config.resolved.json has as the run then did it.
        if before != after and not (before in LEFT_OPEN and after == resolved.get(key, before)):
            found.append((key, show(before), show(after)))
    return found


def _resolved(origin: Origin) -> dict[str, Any]:
    """The config.resolved.json of the run that a checkpoint belongs to, flat; {} where there is none."""
    file = origin.folder.parent / RESOLVED
    return _flat(read_json(file)) if file.is_file() else {}


def check_differences(found: Sequence[tuple[str, str, str]], origin: Origin) -> None:
    """Raises UserError where a key differs on which weights or completions depend."""
    grave = [row for row in found if not _harmless(row[0])]
    if grave:
        listed = ", ".join(f"{key} (was {was}, is {now})" for key, was, now in grave)
        raise UserError(
            f"the config is not that of {origin.folder}: {listed}; --allow-config-change continues anyway"
        )


def earlier_decisions(config: Config, origin: Origin) -> dict[str, Any] | None:
    """What an earlier process decided for this config; None where [rollout] has changed in that."""
    asked = origin.table("config").get("rollout")
    if not isinstance(asked, dict) or any(asked.get(k) != getattr(config.rollout, k) for k in DECIDED):
        return None
    found = origin.table("decided")
    return {name: found[name] for name in DECIDED if name in found}


def decisions(config: Config) -> dict[str, Any]:
    """What `earlier_decisions` gives back: of a config in which nothing is left open."""
    return {name: getattr(config.rollout, name) for name in DECIDED}


def data_digest(examples: Sequence[Example]) -> str:
    """A hash of all that a run trains on, in order."""
    whole = hashlib.sha256()
    for example in examples:
        whole.update(repr((example.tokens, example.answer)).encode("utf-8", "backslashreplace"))
    return whole.hexdigest()


def _opened(folder: Path) -> Origin:
    facts = read_json(folder / TRAINER_STATE)
    step = facts.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UserError(f"{folder / TRAINER_STATE}: step: found {show(step)}, wanted a number of batch steps")
    return Origin(folder, step, facts)


def _flat(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return flat


def _harmless(key: str) -> bool:
    section, _, rest = key.partition(".")
    of_judge = section == "judge" and rest.rpartition(".")[2] in HARMLESS_OF_JUDGES
    return of_judge or key in HARMLESS or section in HARMLESS

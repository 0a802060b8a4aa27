"""trainer_state.json: its fields, and how it is read. It may come from anybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import attrs

from runners.checkpoints.run_folder import TRAINER_STATE
from runners.config import rules
from runners.config.sections import RolloutConfig
from runners.errors import UserError, show
from runners.files.json_files import read_json

VERSION = 5  # before it, moments for calibrated rounding were not saved
_Kind = TypeVar("_Kind")


@attrs.frozen(kw_only=True)
class Decided:
    """Keys of [rollout] that the config left to the machine, as the run's first process found them."""

    launch: str = attrs.field(
        validator=lambda _, __, value: rules.check(value, attrs.fields_dict(RolloutConfig)["launch"])
    )
    max_batch: int = rules.key(attrs.NOTHING, "rows at a time", ">= 0")


@attrs.frozen(kw_only=True)
class TrainerState:
    """What trainer_state.json holds: the run's own state (`loop`), and what a resumed run compares."""

    step: int = rules.key(attrs.NOTHING, "batch steps", ">= 0")
    em: float | None  # of the last evaluation; with the next two it ranks checkpoints
    eval_reward: float | None  # of the last evaluation
    reward: float | None
    config: dict
    decided: Decided
    data: str  # digest of the training data
    inputs: dict  # see `run_inputs`
    arithmetic: dict  # see `Platform.arithmetic`
    logs: dict[str, int]  # bytes of each log
    loop: dict  # the plain fields of `RunState`


def read_trainer_state(folder: Path) -> TrainerState:
    """A checkpoint's trainer_state.json. Raises UserError for anything that no run has saved."""
    file = folder / TRAINER_STATE
    content = read_json(file)
    if content.get("version") != VERSION:
        raise UserError(
            f"{file}: expected version {VERSION}, found {show(content.get('version'))}: another grpo_fn "
            "saved it; finish the run with that one, or start again with --overwrite"
        )
    return from_table(content, TrainerState, str(file))


def from_table(table: object, kind: type[_Kind], where: str) -> _Kind:
    """An attrs value from a JSON object with its fields. UserError, which names the field, for others."""
    if not isinstance(table, dict):
        raise UserError(f"{where}: expected a JSON object, found {show(table)}")
    values: dict[str, Any] = {}
    for field in attrs.fields(attrs.resolve_types(kind)):
        path = f"{where}: {field.name}"
        if field.name not in table:
            raise UserError(f"{path} is missing")
        value = table[field.name]
        if attrs.has(field.type):
            values[field.name] = from_table(value, field.type, path)
            continue
        try:
            values[field.name] = rules.check(value, field)
        except rules.Mismatch as error:
            raise UserError(f"{path}: {error.reason(value)}") from error
    return kind(**values)

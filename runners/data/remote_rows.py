"""Rows that are no local files: of a data set on the Hub, and problems that reasoning-gym generates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from runners.config.names import TASKS
from runners.config.sections import DataConfig
from runners.data.row_files import Row
from runners.errors import UserError, did_you_mean, error_line, show
from runners.machine.versions import install_hint

_CONFIGS = {"openai/gsm8k": "main", "gsm8k": "main"}
_TOGETHER = 1000  # rows that become Python's objects at a time
_TRAIN, _HELD_OUT = 1000, 200  # problems, if data.max_samples does not say otherwise
_FIRST = 1 << 31  # the seed of the first held-out problem: problem n of a seed s is that of s + n


def hub_rows(config: DataConfig, split: str, key: str) -> list[Row]:
    """The rows of a split. UserError, with the split's `key`, if the Hub does not give it."""
    import datasets

    try:
        found = datasets.load_dataset(config.source, config.name or _CONFIGS.get(config.source), split=split)
        # As Arrow's tables: images and sounds stay the bytes of their files.
        tables: Any = found.with_format("arrow").iter(_TOGETHER)  # type: ignore[union-attr]
        rows = enumerate((row for table in tables for row in table.to_pylist()), 1)
        return [Row(values, f"{config.source} ({split}), row {number}") for number, values in rows]
    except Exception as error:  # from the Hub, the network, the disk or the format: each is shown to the user
        place = f"data.source is {show(config.source)}, {key} {show(split)}"
        raise UserError(f"{place}, which the Hub did not give: {error_line(error)}") from error


def task_rows(config: DataConfig, split: str) -> list[Row]:
    """The problems of a split: question, answer, and the `entry` that the task's scoring takes.

    `data.split` has `data.max_samples` problems, or 1,000; any other split has 200, and none of its questions
    is trained on. The same config gives the same problems. Raises UserError if reasoning-gym is missing, and
    for an unknown task or setting in `data.name`.
    """
    if split != config.split:
        return list(_rows(config, split, _FIRST, _HELD_OUT))
    rows = list(_rows(config, split, 0, config.max_samples or _TRAIN))
    if config.eval_split == config.split:
        return rows
    held_out = {row["question"] for row in task_rows(config, config.eval_split)}
    return [row for row in rows if row["question"] not in held_out]


def _rows(config: DataConfig, split: str, seed: int, size: int) -> Iterator[Row]:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError as error:
        raise UserError(
            f"data.source = {show(config.source)} needs reasoning-gym: {install_hint('tasks')}"
        ) from error
    task = config.source.removeprefix(TASKS)
    if task not in DATASETS:
        raise UserError(f"data.source: reasoning-gym has no task {show(task)}{did_you_mean(task, DATASETS)}")
    try:
        settings = json.loads(config.name or "{}")
        for number, entry in enumerate(create_dataset(task, **settings, seed=seed, size=size), 1):
            values: dict[str, Any] = {name: entry[name] for name in ("question", "answer")}
            yield Row({**values, "entry": dict(entry)}, f"{config.source} ({split}), problem {number}")
    except Exception as error:  # no JSON, or settings that the task refuses, most often by assertions
        raise UserError(
            f"data.source = {show(config.source)}, data.name = {show(config.name)}: {error_line(error)}"
        ) from error

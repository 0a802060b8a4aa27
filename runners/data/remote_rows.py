"""Rows that are no local files: of a data set on the Hub, and problems that reasoning-gym generates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runners.config.names import TASKS
from runners.config.sections import DataConfig
from runners.data.row_files import RawRow, find_split, read_file
from runners.errors import UserError, did_you_mean, error_line, show
from runners.machine.versions import install_hint

_CONFIGS = {"openai/gsm8k": "main", "gsm8k": "main"}
_TOGETHER = 1000  # rows that become Python's objects at a time
_TRAIN, _HELD_OUT = 1000, 200  # problems, if data.max_samples does not say otherwise
_FIRST = 1 << 31  # the seed of the first held-out problem: problem n of a seed s is that of s + n


def hub_rows(config: DataConfig, split: str, key: str) -> list[RawRow]:
    """The rows of a split. UserError, with the split's `key`, if the Hub does not give it."""
    import datasets

    from runners.data.parquet_rows import table_rows

    name = config.name or _CONFIGS.get(config.source)
    try:
        found = datasets.load_dataset(config.source, name, split=split)
        # As Arrow's tables: images and sounds stay the bytes of their files.
        tables = found.with_format("arrow").iter(_TOGETHER)  # type: ignore[union-attr]
        rows = enumerate((row for table in tables for row in table_rows(table)), 1)
        return [RawRow(f"{config.source} ({split}), row {number}", *row).sized() for number, row in rows]
    except Exception as error:  # from the Hub, the network, the disk or the format: each is shown to the user
        folder = _downloaded(config.source, name or "")
        if folder is not None and not isinstance(error, ValueError):
            return [raw for path in find_split(folder, split, key) for raw in read_file(path)]
        if isinstance(error, ConnectionError | TimeoutError):
            place = f"data.source is {show(config.source)}, neither a local path nor within reach on the Hub"
        elif isinstance(error, ValueError) and "split" in str(error):
            place = f"{key} is {show(split)}, which {config.source} does not have"
        else:
            place = f"data.source is {show(config.source)}, which the Hub did not give"
        raise UserError(f"{place}: {error_line(error)}") from error


def _downloaded(source: str, name: str) -> Path | None:
    """A data set's folder in the Hub's cache, where `datasets` does not look; None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        whole = Path(snapshot_download(source, repo_type="dataset", local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return whole / name if name and (whole / name).is_dir() else whole


def task_rows(config: DataConfig, split: str) -> list[RawRow]:
    """The problems of a split: question, answer, and the `entry` that the task's scoring takes.

    `data.split` has `data.max_samples` problems, or 1,000; any other split has 200, and none of its questions
    is trained on. The same config gives the same problems.

    Raises UserError if reasoning-gym is missing, and for an unknown task or setting in `data.name`.
    """
    if split != config.split:
        return list(_rows(config, split, _FIRST, _HELD_OUT))
    rows = list(_rows(config, split, 0, config.max_samples or _TRAIN))
    if config.eval_split == config.split:
        return rows
    held_out = {row.values["question"] for row in task_rows(config, config.eval_split)}
    return [row for row in rows if row.values["question"] not in held_out]


def _rows(config: DataConfig, split: str, seed: int, size: int) -> Iterator[RawRow]:
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
        found = create_dataset(task, **_settings(config.name), seed=seed, size=size)
        for number, entry in enumerate(found, 1):
            values: dict[str, Any] = {name: entry[name] for name in ("question", "answer")}
            yield RawRow(f"{config.source} ({split}), problem {number}", {**values, "entry": dict(entry)})
    except Exception as error:  # a task checks its settings by assertions, or fails while it generates
        raise UserError(f"data.source = {show(config.source)}: {error_line(error)}") from error


def _settings(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"data.name: expected a JSON object of the task's settings, found {show(text)}")
    return found

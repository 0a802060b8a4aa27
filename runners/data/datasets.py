"""Loads questions and reference answers from the Hub, from a local file or folder, or from the
package, and checks each row.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from runners.answers.forms import FORMS, NONE
from runners.answers.values import parse_number
from runners.config.loading import Config
from runners.config.names import TASKS, TASKSETS, other_name
from runners.config.sections import DataConfig
from runners.config.user_functions import resolve_function
from runners.data.messages import gold_turn, prompt_fault, prompt_of
from runners.data.prompts import gold_answer, image_folder
from runners.data.row_files import (
    SUFFIXES,
    Row,
    Rows,
    Transform,
    find_split,
    read_file,
    skip_row,
    split_name,
    table_rows,
    transformed,
)
from runners.errors import UserError, did_you_mean, error_line, listed, show, user_errors
from runners.images.image_files import image_files
from runners.machine.versions import install_hint
from runners.quickstart import DATA
from runners.sandbox.code_tests import read_tests
from runners.sandbox.sandbox import check_sandbox
from runners.user_code.worker import Worker

ROWS = "runners.agents.tasksets:rows"  # the operation that reads a taskset

_MAX_HELD_OUT = 1000
_LOOKED_AT = 100  # rows whose reference answers are inspected
_CONFIGS = {"openai/gsm8k": "main", "gsm8k": "main"}
_TOGETHER = 1000  # rows converted to Python objects at a time
_TRAIN = 1000  # default number of a task's training problems
_HELD_OUT = 200  # number of a task's held-out problems
_FIRST = 1 << 31  # seed of the first held-out problem; problem n with seed s uses s + n


def load_rows(config: DataConfig, folders: Sequence[Path] = ()) -> tuple[Rows, Rows]:
    """Returns the rows for training (the first `max_samples`) and the rows for evaluation.

    A source is the name of a shipped data set, a local file or folder, or a Hub name. A single file
    counts as the split "train". If there is only one split (a file, or `eval_split` equal to
    `split`), the last tenth of its usable rows, at least one and at most 1,000, is held out for
    evaluation and not trained on. `data.transform` (found in `folders`, see `resolve_function`) is
    applied to each row first. The transform returns the row to use, or None to skip the row.

    A row is invalid if it has no question or (unless `data.answer` is empty) no answer. With
    `on_bad_row` "raise", an invalid row raises an error with its location. With "skip", an invalid
    row is skipped and recorded in `Rows.faults`. Raises UserError for a missing source, split or
    field (the message lists the existing ones), for an invalid row, and for a split without usable
    rows.
    """
    source = _local(config)
    is_file = source is not None and source.is_file()
    if is_file and config.split != "train":
        raise UserError(
            f'{source} is a file, so its only split is "train", but data.split is '
            f"{show(config.split)}"
        )
    train = load_split(config, config.split, folders=folders, key="data.split")
    if is_file or split_name(config.eval_split) == split_name(config.split):
        if len(train) < 2:
            raise UserError(
                f"{config.source}: expected at least two usable rows, because one is held out for "
                "evaluation, found one"
            )
        count = min(max(len(train) // 10, 1), _MAX_HELD_OUT)
        evaluation = Rows(train[-count:])
        del train[-count:]
    else:
        evaluation = load_split(config, config.eval_split, folders=folders)
    del train[config.max_samples or len(train) :]
    return train, evaluation


def with_answers_of(config: Config, *parts: Rows) -> Config:
    """Returns the config adapted to these rows. If no row has the column `data.answer`, reference
    answers are turned off. If most reference answers are not numbers, a default system prompt that
    requests a number is replaced by one that requests an answer.

    Raises UserError if programs have no sandbox, for tests that no program can pass, and for
    reference answers that are lists if `answer.form` is not "code".
    """
    form = config.answer.form
    name = config.data.answer
    if form == "code":
        check_sandbox(partial=config.answer.partial_sandbox)  # before a model is loaded
    rows = list(chain.from_iterable(parts))
    if not any(name in row for row in rows):
        return config.having("data", answer="").having("answer", form=NONE)
    for row in rows:
        value = row.get(name)
        with user_errors(f"{row.place}: {name}", ValueError):
            if form == "code":
                read_tests(value)
            elif form != NONE and isinstance(value, list | dict):
                raise ValueError(
                    'expected a string or a number; tests for programs require form = "code"'
                )
    golds = list(filter(None, (gold_answer(row.get(name)) for row in rows[:_LOOKED_AT])))
    prompt = config.data.system_prompt
    texts = sum(parse_number(gold) is None for gold in golds)
    if 2 * texts <= len(golds) or prompt != FORMS["xml"].instruction:
        return config
    return config.having(
        "data", system_prompt=prompt.replace("the final number", "the final answer")
    )


def load_split(
    config: DataConfig, split: str, *, folders: Sequence[Path] = (), key: str = "data.eval_split"
) -> Rows:
    """Returns all usable rows of one split, with nothing held out. A single file is used for any
    split name.

    `key` is the config key that names the split. Raises the errors of `load_rows`.
    """
    transform = None
    if config.transform:
        transform = resolve_function(
            config.transform, folders, key="data.transform", takes=("row",)
        )
    source = _local(config)
    where = f"{config.source} ({split})"
    if source is None:
        if config.source.startswith(TASKS):
            found = task_rows(config, split)
        elif config.source.startswith(TASKSETS):
            found = taskset_rows(config, folders)
        else:
            found = hub_rows(config, split, key)
    else:
        paths = [source] if source.is_file() else find_split(source, split, key)
        where = str(paths[0]) if len(paths) == 1 else where
        found = list(chain.from_iterable(map(read_file, paths)))
    return _usable(found, config, where, transform)


def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of the n examples in an epoch: an int64 permutation that depends only on
    the arguments.
    """
    return np.random.default_rng([seed, epoch]).permutation(n)


def _local(config: DataConfig) -> Path | None:
    """Returns a source's file or folder, or None if the source is a Hub name or a task."""
    source = DATA.get(config.source) or Path(config.source).expanduser()
    if source.exists():
        if config.name:
            raise UserError(
                f"data.name is {show(config.name)}, a configuration on the Hub, but data.source "
                f"{show(config.source)} is local; omit data.name"
            )
        return source
    # A Hub name has at most one slash and no file suffix.
    looks_local = config.source.startswith((".", "/", "~")) or config.source.count("/") > 1
    if looks_local or config.source.lower().endswith(SUFFIXES) or config.source in DATA:
        raise UserError(
            f"data.source is {show(config.source)}, but there is no file or folder {source}"
        )
    return None


def _usable(found: list[Row], config: DataConfig, where: str, transform: Transform | None) -> Rows:
    """Returns the rows with a question and an answer. Any other row raises an error or is
    counted.
    """
    rows = Rows()
    made = [transformed(row, transform) for row in found]
    kept = [row for row in made if row is not None]
    rows.dropped = len(found) - len(kept)
    if config.answer == DataConfig().answer and not any(config.answer in row for row in kept):
        # Data without reference answers lacks the default column.
        config = attrs.evolve(config, answer="")
    _check_fields(kept, config, where)
    for row in kept:
        fault = row.fault or _fault(row, config)
        if fault:
            rows.faults[row.place] = skip_row(row.place, fault, config.on_bad_row)
        else:
            rows.append(row)
    if not rows:
        raise UserError("; ".join([f"{where} contains no usable row", *rows.notices("its", 0, 0)]))
    return rows


def _check_fields(rows: list[Row], config: DataConfig, where: str) -> None:
    found = list(dict.fromkeys(chain.from_iterable(rows)))
    for key in ("prompt" if config.prompt else "question", "answer", "image", "completion"):
        field = getattr(config, key)
        if found and field and field not in found:
            hint = did_you_mean(field, found)
            if key == "answer" and not hint:
                hint = '; set data.answer = "" if only your own rewards score completions'
            raise UserError(
                f"{where}: no field named {show(field)} (data.{key}); found {listed(found)}{hint}"
            )


def _fault(row: Mapping[str, Any], config: DataConfig) -> str:
    field = config.prompt or config.question
    question = prompt_of(row, config)
    answer = row.get(config.answer)
    if question is None:
        return f"no {field}"
    if not config.prompt and not isinstance(question, str):
        return f"{field}: expected text, found {type(question).__name__}"
    fault = prompt_fault(question)
    if fault:
        ended = gold_turn(question) is not None and config.completion != field
        hint = f"; data.completion = {show(field)} uses that turn as the reference completion"
        return f"{field} {fault}{hint if ended else ''}"
    if config.prompt_form == "raw" and not isinstance(question, str):
        return f'{field}: expected a text with data.prompt_form = "raw", found a list of messages'
    gold = gold_answer(answer) if config.answer else ""
    if gold is None:
        return f"expected an answer in {show(config.answer)}, found {show(answer)}"
    try:
        if config.image:
            image_files(row.get(config.image), image_folder(config))
        f"{question}{gold}".encode()
    except UserError as error:
        return f"{config.image} {error}"
    except UnicodeEncodeError as error:
        return (
            f"half of a surrogate pair, {error.object[error.start]!a}, which tokenizers cannot "
            "process"
        )
    return ""


def hub_rows(config: DataConfig, split: str, key: str) -> list[Row]:
    """Returns a split's rows from the Hub. Raises UserError, with the split's `key`, if the Hub
    does not provide the split.
    """
    other = other_name(config.source)
    if other:
        raise UserError(f"data.source = {show(config.source)} is {other}")
    import datasets

    # The Hub, the network, the disk or the format may fail.
    with user_errors(
        f"data.source is {show(config.source)}, {key} {show(split)}, which could not be downloaded",
        Exception,
        why=error_line,
    ):
        found = datasets.load_dataset(
            config.source, config.name or _CONFIGS.get(config.source), split=split
        )
        # Arrow tables keep images and sounds as the bytes of their files.
        tables: Any = found.with_format("arrow").iter(_TOGETHER)  # type: ignore[union-attr]
        rows = enumerate(chain.from_iterable(map(table_rows, tables)), 1)
        return [Row(values, f"{config.source} ({split}), row {number}") for number, values in rows]


def taskset_rows(config: DataConfig, folders: Sequence[Path]) -> list[Row]:
    """Returns the tasks of a taskset in order: question, answer (if any) and number. A separate
    process reads the taskset. Raises UserError if the taskset cannot be loaded.
    """
    name = config.source.removeprefix(TASKSETS)
    with closing(Worker()) as worker:
        rows = worker.load(ROWS, name, tuple(map(str, folders)), config.max_samples)
    return [Row(row, f"{config.source}, task {row['task']}") for row in rows]


def task_rows(config: DataConfig, split: str) -> list[Row]:
    """Generates a split's problems: question, answer, and the `entry` that the task's scoring
    needs.

    `data.split` has `data.max_samples` problems, by default 1,000. Any other split has 200
    problems, whose questions are not used for training. The same config always produces the same
    problems. Raises UserError if reasoning-gym is missing, and for an unknown task or setting in
    `data.name`.
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
        # an optional dependency
        from reasoning_gym.factory import (  # pyright: ignore[reportMissingImports]
            DATASETS,
            create_dataset,
        )
    except ImportError as error:
        raise UserError(
            f"data.source = {show(config.source)} requires reasoning-gym: {install_hint('tasks')}"
        ) from error
    task = config.source.removeprefix(TASKS)
    if task not in DATASETS:
        raise UserError(
            f"data.source: reasoning-gym has no task {show(task)}{did_you_mean(task, DATASETS)}"
        )
    # Invalid JSON, or settings that the task rejects (usually with an assertion).
    with user_errors(
        f"data.source = {show(config.source)}, data.name = {show(config.name)}",
        Exception,
        why=error_line,
    ):
        problems = create_dataset(task, **json.loads(config.name or "{}"), seed=seed, size=size)
        for number, entry in enumerate(problems, 1):
            yield Row(
                {"question": entry["question"], "answer": entry["answer"], "entry": dict(entry)},
                f"{config.source} ({split}), problem {number}",
            )

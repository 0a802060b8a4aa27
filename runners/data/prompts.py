"""Converts rows into prompts for rollouts and evaluation: messages, text and tokens."""

import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from runners.answers.values import value_text, without_exponent
from runners.config.names import REWARD_ARGUMENTS
from runners.config.sections import DataConfig
from runners.data.messages import Message, conversation, prompt_of
from runners.data.rendering import opening, render
from runners.data.row_files import Rows, skip_row
from runners.errors import UserError
from runners.images.image_files import ImageFile, image_files
from runners.images.processor import ImageProcessor, load_processor
from runners.quickstart import DATA

GOLD_MARK = "####"


@attrs.frozen
class Example:
    """One problem, ready for a rollout."""

    messages: tuple[Message, ...]  # the prompt that rewards receive, without the nudge
    text: str  # the rendered prompt, including the nudge
    tokens: tuple[int, ...]  # token ids of `text`; each cell of an image is one token
    answer: str  # the reference answer; empty if there is none
    columns: dict[str, Any]  # the row's columns for rewards; `answer` is the reference answer
    images: tuple[ImageFile, ...] = ()  # in the order of the prompt
    # index among the split's usable rows or, with a curriculum, among the run's prompts
    number: int = 0
    gold: tuple[int, ...] = ()  # tokens of the reference completion with its end; empty if not read
    opening: str = ""  # text of the chat template that starts each completion, before the nudge


def image_folder(config: DataConfig) -> Path | None:
    """Returns the folder that paths in rows are relative to: `data.image_folder` or, by default,
    the data's folder. Returns None for data from the Hub.
    """
    if config.image_folder:
        return Path(config.image_folder).expanduser()
    source = DATA.get(config.source) or Path(config.source).expanduser()
    if source.is_file():
        return source.parent
    return source if source.is_dir() else None


def processor_of(
    config: DataConfig, path: Path, stated: Mapping[str, Any]
) -> ImageProcessor | None:
    """Returns a model folder's image processor, or None without `data.image`. `stated` is the
    folder's config.json.

    Raises the errors of `load_processor`.
    """
    return load_processor(path, stated, config.image_max_pixels) if config.image else None


def build_examples(
    rows: Rows,
    config: DataConfig,
    tokenizer: Any,
    tools: Sequence[dict[str, Any]] = (),
    processor: ImageProcessor | None = None,
    columns: Mapping[str, str] | None = None,
) -> tuple[list[Example], int]:
    """Returns the examples from usable rows, in order, and the number of prompts that are longer
    than max_prompt_length.

    Every example has all `columns`, by default the `reward_columns` of the rows; missing values are
    None. A row that the chat template or the tokenizer rejects raises UserError with its location;
    with `on_bad_row` "skip", the row is recorded in `Rows.faults` instead. Also raises UserError if
    no row is left.
    """
    if config.image and processor is None:
        raise UserError("data.image names a column, but this command does not use images")
    fields = reward_columns(rows, config.answer) if columns is None else columns
    raw = config.prompt_form == "raw"
    kwargs = config.chat_template_kwargs
    begun = opening(tokenizer, kwargs, raw=raw)

    def example_of(row: Mapping[str, Any], number: int) -> Example:
        gold = (gold_answer(row[config.answer]) or "") if config.answer else ""
        messages = conversation(prompt_of(row, config), config.system_prompt)
        images = image_files(row.get(config.image), image_folder(config)) if config.image else ()
        text, tokens = render(
            tokenizer,
            messages,
            config.nudge,
            tools=tools,
            template_kwargs=kwargs,
            images=images,
            processor=processor,
            raw=raw,
        )
        values = {column: row.get(field) for column, field in fields.items()}
        values |= {"answer": gold} if config.answer else {}
        return Example(messages, text, tokens, gold, values, images, number, opening=begun)

    examples: list[Example] = []
    for number, row in enumerate(rows):
        try:
            examples.append(example_of(row, number))
        except UserError as error:
            rows.faults[row.place] = skip_row(row.place, str(error), config.on_bad_row)
    if rows and not examples:
        raise UserError(
            f"all {len(rows)} rows are invalid; for example, {list(rows.faults.values())[-1]}"
        )
    kept = [example for example in examples if len(example.tokens) <= config.max_prompt_length]
    if rows and not kept:
        raise UserError(
            f"data.max_prompt_length is {config.max_prompt_length}, but the shortest of "
            f"{len(examples)} prompts has {min(len(example.tokens) for example in examples)} tokens"
        )
    return kept, len(examples) - len(kept)


def reward_columns(rows: Iterable[Mapping[str, Any]], answer: str = "answer") -> dict[str, str]:
    """Returns the columns that rewards can use, each mapped to its field in the rows.

    The columns are all fields that occur in the rows and, if the data has a column with reference
    answers, `answer`. A field is renamed (to ``column_completions``, for example) if its name is
    `self`, an argument of every reward (completions, prompts, completion_ids), or `answer` although
    another column contains the reference answers.
    """
    fields = dict.fromkeys(chain.from_iterable(rows))
    taken = {*REWARD_ARGUMENTS, "self"}
    if answer not in ("", "answer"):
        taken.add("answer")
    columns = {}
    for field in fields:
        name = field
        while name in taken or (name != field and name in fields):
            name = f"column_{name}"
        columns[name] = field
    return {**columns, "answer": answer} if answer else columns


def columns_of(examples: Sequence[Example], num_generations: int = 1) -> dict[str, list[Any]]:
    """Returns the examples' columns as lists for the scorer. Each entry is repeated once for each
    of the G completions.
    """
    rows = repeated(examples, num_generations)
    names = examples[0].columns if examples else ()
    return {name: [row.columns[name] for row in rows] for name in names}


def repeated(examples: Sequence[Example], number: int) -> list[Example]:
    """Repeats each example `number` times in succession: once for each of its completions."""
    return list(chain.from_iterable([example] * number for example in examples))


def gold_answer(value: object) -> str | None:
    """Extracts the answer from a row's field: the stripped text after the last ``####``, or the
    whole text. Returns None if there is no answer.

    Texts, numbers and booleans can be answers; NaN cannot. Numbers (including texts with an
    exponent) are written as plain decimals, booleans as ``true`` or ``false``, and lists and
    objects (the tests of a program) as JSON.
    """
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, list | dict):
        return json.dumps(value, default=str) if value else None
    if not isinstance(value, str | Real | Decimal):
        return None
    try:
        text = value_text(value)
    except ValueError:  # an integer with thousands of digits
        return None
    if not isinstance(value, str) and not text.lstrip("-")[:1].isdigit():  # nan, inf
        return None
    return without_exponent(text.rpartition(GOLD_MARK)[2].strip()) or None

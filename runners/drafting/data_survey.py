"""What a data set seems to hold: which columns are prompt and answer, and the form of the answers."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from runners.answers.values import parse_number
from runners.config.sections import DataConfig
from runners.data.messages import prompt_fault
from runners.data.prompts import gold_answer
from runners.data.remote_rows import hub_rows
from runners.data.row_files import SUFFIXES, find_split, read_file
from runners.data.value_text import value_text
from runners.errors import UserError, listed
from runners.quickstart import DATA
from runners.sandbox.code_tests import read_tests

LOOKED = 500
"""Rows that are looked at, from the first."""
_QUESTIONS = ("question", "problem", "prompt", "instruction", "query", "input", "text", "sentence")
_ANSWERS = (
    "tests",
    "test_list",
    *("answer", "final_answer", "solution", "label", "target", "gold", "ground_truth", "reference_answer"),
    *("output", "response", "completion", "chosen", "expected"),
)
_ENOUGH = 0.95  # of the answers have to have a form
_LABELS = "a few labels"
_MOST_LABELS = 20
_LABEL_LENGTH = 40  # characters
_ASSERT = re.compile(r"(?m)^[ \t]*assert\b")
_LETTER = re.compile(r"\(?[A-Ja-j]\)?[.:]?")


@attrs.frozen(kw_only=True)
class DataSurvey:
    """A data set as `data` and `answer.form` of a config describe it."""

    split: str
    eval_split: str  # the same as `split`: a part is held out
    rows: tuple[dict[str, Any], ...]  # the first ones that can be read
    question: str  # the column of texts; empty: `prompt` is used
    prompt: str  # the column of messages
    answer: str  # the column of answers; empty: none
    form: str  # as `answer.form`
    why: str  # what was found in the answers
    labels: tuple[str, ...]  # if a few short texts are the only answers: these

    @property
    def answers(self) -> list[str]:
        """The answers that were looked at, as texts."""
        return [_text(row[self.answer]) for row in self.rows if row.get(self.answer) is not None]


def survey_data(source: str) -> DataSurvey:
    """Looks at the first rows of a file, a folder, a data set of the Hub, or a shipped one.

    Raises UserError if there are none, or no column holds a question.
    """
    split, eval_split, rows = _first_rows(source)
    if not rows:
        raise UserError(f"{source}: expected rows with a question, found none that can be read")
    columns = {name: [row[name] for row in rows if row.get(name) is not None] for name in rows[0]}
    columns = {name: values for name, values in columns.items() if len(values) * 2 > len(rows)}
    talks = [name for name, values in columns.items() if all(map(_is_conversation, values))]
    texts = [name for name, values in columns.items() if all(isinstance(value, str) for value in values)]
    question = "" if talks else _named(texts, _QUESTIONS) or _longest(texts, columns)
    if not talks and not question:
        raise UserError(f"{source}: expected a column of questions, found {listed(list(columns))}")
    asked = (question, *talks[:1])
    others = [name for name in columns if name not in asked and all(map(gold_answer, columns[name]))]
    coded = _named([name for name in others if all(map(_has_tests, columns[name]))], _ANSWERS)
    plain = [name for name in others if not any(isinstance(value, list | dict) for value in columns[name])]
    answer = coded or _named(plain, _ANSWERS)
    values = list(map(_text, columns[answer])) if answer else []
    form, why = ("code", "tests of a program") if coded else _form(values)
    return DataSurvey(
        split=split,
        eval_split=eval_split,
        rows=tuple(rows),
        question=question,
        prompt=talks[0] if talks else "",
        answer=answer,
        form=form,
        why=why or "no column of answers",
        labels=tuple(sorted(set(values))) if why == _LABELS else (),
    )


def _first_rows(source: str) -> tuple[str, str, list[dict[str, Any]]]:
    """The names of the training and evaluation split, and the first training rows without faults."""
    place = DATA.get(source) or Path(source).expanduser()
    if place.is_file():
        return "train", "train", _sound(read_file(place))
    if not place.exists() and (source.startswith((".", "/", "~")) or place.suffix.lower() in SUFFIXES):
        raise UserError(f'DATA = "{source}": there is no such file or folder')
    config = DataConfig(source=source)

    @functools.cache
    def read(split: str) -> list[Any]:
        if not place.exists():
            return hub_rows(config, split, "data.split")
        return [row for path in find_split(place, split, "data.split") for row in read_file(path)]

    train, fault = _first_split(read, ("train",))
    if not train and place.is_dir():  # one file of another name
        files = sorted(file for file in place.iterdir() if file.suffix in SUFFIXES)
        train = files[0].stem if len(files) == 1 else ""
    if not train:
        raise fault or UserError(f"{source}: expected a file train.jsonl, found none")
    evaluation, _ = _first_split(read, ("test", "valid", "validation"))
    return train, evaluation or train, _sound(read(train))


def _first_split(read: Callable[[str], Any], names: Sequence[str]) -> tuple[str, UserError | None]:
    fault = None
    for name in names:
        try:
            read(name)
        except UserError as error:
            fault = fault or error
        else:
            return name, None
    return "", fault


def _sound(found: Sequence[Any]) -> list[dict[str, Any]]:
    return [row for row in found[:LOOKED] if not row.fault]


def _text(value: Any) -> str:
    """An answer as text: true and false as they are compared, in small letters."""
    return (gold_answer(value) or "") if isinstance(value, bool) else value_text(value)


def _has_tests(value: Any) -> bool:
    """Whether these are tests of a program: statements with `assert`, or inputs and outputs."""
    try:
        tests = read_tests(value)
    except ValueError:
        return False
    return any(isinstance(test, dict) or _ASSERT.search(test) for test in tests)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and not prompt_fault(value)


def _named(columns: Sequence[str], known: Sequence[str]) -> str:
    """The column whose name comes first among known ones, whatever its capital letters; empty: none."""
    spelled = {column.lower(): column for column in columns}
    return next((spelled[name] for name in known if name in spelled), "")


def _longest(texts: Sequence[str], columns: Mapping[str, Sequence[str]]) -> str:
    """The column with the longest texts: answers are shorter than questions."""
    return max(texts, key=lambda name: sum(map(len, columns[name])), default="")


def _form(answers: Sequence[str]) -> tuple[str, str]:
    """The form that nearly all answers have, as `answer.form`, and what was found."""
    if not answers:
        return "none", ""
    texts = [answer.strip() for answer in answers]

    def share(has: Callable[[str], Any]) -> bool:
        return sum(map(bool, map(has, texts))) >= _ENOUGH * len(texts)

    labels = {text.lower() for text in texts}
    if share(lambda text: "####" in text):
        behind = [text.rpartition("####")[2].strip() for text in texts]
        if sum(parse_number(text) is not None for text in behind) >= _ENOUGH * len(texts):
            return "last_number", "numbers behind ####"  # which a model that does not write #### has, too
        return "gsm8k", "answers behind ####"
    if share(lambda text: "\\boxed{" in text):
        return "boxed", "answers in \\boxed{}"
    if share(_json_object):
        field = _field(texts)
        return (f"json:{field}", f"JSON objects with {field}") if field else ("none", "various JSON objects")
    if len(labels) > 1 and share(_LETTER.fullmatch):
        return "letter", f"the letters {', '.join(sorted({text.strip('(). :').upper() for text in texts}))}"
    if share(lambda text: parse_number(text) is not None):
        return "last_number", "numbers"
    if len(labels) <= min(_MOST_LABELS, len(texts) // 2) and max(map(len, texts)) <= _LABEL_LENGTH:
        return "exact", _LABELS
    if share(lambda text: len(text) <= _LABEL_LENGTH and "\n" not in text):
        return "exact", "short texts"
    return "none", "long texts, which no rule compares"


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text) if text.startswith("{") else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _field(texts: Sequence[str]) -> str:
    """The first field that all objects have."""
    found = [set(table) for text in texts if (table := _json_object(text))]
    first = _json_object(next(text for text in texts if _json_object(text))) or {}
    return next((name for name in first if all(name in fields for fields in found)), "")

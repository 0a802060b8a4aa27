"""Implements `grpo init`: inspects a model and a data set, and writes a suitable config for
them.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from runners.answers.values import parse_number, value_text
from runners.config.loading import known_values
from runners.config.names import EXAMPLE_REWARD
from runners.config.reading import Settings
from runners.config.sections import DataConfig
from runners.data.datasets import hub_rows
from runners.data.messages import gold_turn, prompt_fault
from runners.data.prompts import gold_answer
from runners.data.rendering import has_template
from runners.data.row_files import SUFFIXES, Row, find_split, read_file
from runners.errors import ConfigError, UserError, did_you_mean, gigabytes, listed
from runners.files.tensor_files import weight_files
from runners.files.toml_files import toml_text
from runners.models.folders import read_config, resolve_model
from runners.models.model_reader import load_tokenizer
from runners.quickstart import DATA, MODELS
from runners.sandbox.code_tests import read_tests

_LOOKED = 500  # number of first rows that are inspected
REWARD = (
    '''\
"""An example reward from `grpo init`; higher is better. Replace it with your own."""


'''
    + EXAMPLE_REWARD
)
_QUESTIONS = ("question", "problem", "prompt", "instruction", "query", "input", "text", "sentence")
_ANSWERS = (
    *("tests", "test_list", "answer", "final_answer", "solution", "label", "target", "gold"),
    *("ground_truth", "reference_answer", "output", "response", "completion", "chosen"),
    "expected",
)
_ENOUGH = 0.95  # share of answers that must match a format
_MOST_LABELS = 20
_SHORT = 40  # longest answer that is compared as a complete text, in characters
_LABELS = "a few labels"
_HEADING = (
    "Written by `grpo init`. `grpo-run --explain SECTION` shows other keys and their defaults."
)
_BYTES = 16  # per trained parameter: master weight, two moments, gradient
_TOKENS = {
    "letter": 256,
    "exact": 64,
    "none": 256,
}  # length limit of completions by form; otherwise 512
_ENDS = {
    "exact": "\n",
    "code": "\n```",
}  # stop string of a base model by form; otherwise an empty line


@attrs.frozen
class DataSurvey:
    """A data set described in terms of a config's `data` and `answer.form`."""

    eval_split: str  # "train": a part is held out
    question: str  # the column of texts; empty: `prompt` is used
    prompt: str  # the column of messages
    completion: str  # the column of messages that the assistant's turn ends; empty: none
    answer: str  # the column of answers; empty: none
    form: str  # as `answer.form`
    why: str  # what was found in the answers
    labels: str  # the answers, if they are only a few short texts
    columns: tuple[str, ...]  # the columns that most rows have


def survey_model(name: str) -> tuple[str, int, bool]:
    """Inspects a model, named by its folder, its Hub name or its shipped name. Returns its size and
    kind in words, the bytes needed to train all weights (0 if they are packed), and whether it has
    a chat template (a base model has none).

    Only the shapes of the weights are read. Raises UserError for a model that a run cannot use.
    """
    folder = resolve_model(name, "MODEL")
    packed = read_config(folder).get("quantization")
    count = 0
    for file in weight_files(folder):
        arrays: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
        count += sum(array.size for array in arrays.values())
    words = (
        f"{packed.get('bits', '?')} bits per weight"
        if packed
        else f"{count / 1e6:,.3g} million parameters"
    )
    templated = has_template(load_tokenizer(folder))
    return (
        words if templated else f"{words}, no chat template",
        0 if packed else _BYTES * count,
        templated,
    )


def survey_data(source: str, question: str = "", answer: str = "") -> DataSurvey:
    """Inspects the first rows of a file, a folder, a Hub data set, or a shipped data set.

    `question` and `answer` name the columns; if empty, they are found by their names and values.
    Raises UserError if there are no rows, and for a column that is missing or contains no questions
    or answers.
    """
    eval_split, train = _rows(source)
    rows = [row for row in train[:_LOOKED] if not row.fault]
    if not rows:
        raise UserError(f"{source}: expected rows with a question, found no readable ones")
    columns = {name: [row[name] for row in rows if row.get(name) is not None] for name in rows[0]}
    columns = {name: values for name, values in columns.items() if len(values) * 2 > len(rows)}

    for option, name in (("--question", question), ("--answer", answer)):
        if name and name not in columns:
            raise UserError(
                f"{option} {name}: expected one of {listed([*columns])}"
                f"{did_you_mean(name, columns)}"
            )

    def having(has: Callable[[Any], Any], names: Iterable[str] = columns) -> list[str]:
        return [name for name in names if all(map(has, columns[name]))]

    asked = [question] if question else list(columns)
    known = [answer] if answer else _ANSWERS
    talks = having(_is_talk, asked)[:1]
    texts = having(lambda value: isinstance(value, str), asked)
    # Without a known name, the column with the longest texts: answers are shorter than questions.
    longest = max(texts, key=lambda name: sum(map(len, columns[name])), default="")
    question = "" if talks else _named(texts, _QUESTIONS) or longest
    if not talks and not question:
        raise UserError(f"{source}: expected a column of questions, found {listed(asked)}")
    ended = having(lambda value: gold_turn(value) is not None)  # by the assistant
    completion = next((name for name in (*talks, *ended) if name in ended), "")
    others = [name for name in having(gold_answer) if name not in (question, *talks, *ended)]
    coded = _named(having(_has_tests, others), known)
    compared = _named(having(lambda value: not isinstance(value, list | dict), others), known)
    if answer and not (coded or compared):
        raise UserError(
            f"--answer {answer}: expected an answer in each row, found rows without one in {source}"
        )
    answer = coded or compared
    found = columns[answer] if answer else []
    values = [
        str(gold_answer(value)) if isinstance(value, bool) else value_text(value) for value in found
    ]
    form, why = ("code", "tests of a program") if coded else _form(values)
    return DataSurvey(
        eval_split=eval_split,
        question=question,
        prompt=talks[0] if talks else "",
        completion=completion,
        answer=answer,
        form=form,
        why=why,
        labels=", ".join(sorted(set(values))) if why == _LABELS else "",
        columns=tuple(columns),
    )


def _is_talk(value: Any) -> bool:
    """Returns whether a value is a list of messages: a prompt, with or without the assistant's turn
    after the prompt.
    """
    before = value[:-1] if gold_turn(value) is not None else value
    return isinstance(value, list) and not prompt_fault(before)


def _rows(source: str) -> tuple[str, Sequence[Row]]:
    """Returns the evaluation split's name, and the training rows."""
    place = DATA.get(source) or Path(source).expanduser()
    if place.is_file() or place.suffix.lower() in SUFFIXES:
        return "train", read_file(place)

    def read(split: str) -> Sequence[Row]:
        if not place.exists() and not source.startswith((".", "/", "~")):
            return hub_rows(DataConfig(source=source), split, "data.split")
        return [*chain.from_iterable(map(read_file, find_split(place, split, "data.split")))]

    rows = read("train")
    for split in ("test", "valid", "validation"):
        with suppress(UserError):
            if read(split):
                return split, rows
    return "train", rows


def _has_tests(value: Any) -> bool:
    """Returns whether a value contains tests for a program: statements with `assert`, or inputs and
    outputs.
    """
    try:
        return any(isinstance(test, dict) or "assert" in test for test in read_tests(value))
    except ValueError:
        return False


def _named(columns: Sequence[str], known: Sequence[str]) -> str:
    """Returns the column whose name comes first among the known names, regardless of case, or an
    empty text if no column has a known name.
    """
    spelled = {column.lower(): column for column in columns}
    return next((spelled[name.lower()] for name in known if name.lower() in spelled), "")


def _form(answers: Sequence[str]) -> tuple[str, str]:
    """Returns the `answer.form` that matches nearly all answers, and a description of the
    answers.
    """
    texts = [answer.strip() for answer in answers]
    if not texts:
        return "none", "no answer column"
    few = len({text.lower() for text in texts}) <= min(_MOST_LABELS, len(texts) // 2)
    kinds: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
        # Also numbers after ####, because a model that does not write #### ends with one, too.
        (
            "last_number",
            "numbers",
            lambda text: parse_number(text.rpartition("####")[2].strip()) is not None,
        ),
        ("gsm8k", "answers after ####", lambda text: "####" in text),
        ("boxed", "answers in \\boxed{}", lambda text: "\\boxed{" in text),
        ("letter", "letters", re.compile(r"\(?[A-Ja-j]\)?[.:]?").fullmatch),
        (
            "exact",
            _LABELS if few else "short texts",
            lambda text: len(text) <= _SHORT and "\n" not in text,
        ),
    )
    for form, why, has in kinds:
        if sum(bool(has(text)) for text in texts) >= _ENOUGH * len(texts):
            return form, why
    return "none", "long texts, which cannot be compared"


def draft(
    model: str,
    data: str,
    about: tuple[str, int, bool],
    found: DataSurvey,
    *,
    reward: str,
    memory: int,
) -> str:
    """Returns the config as TOML, from the results of `survey_model` and `survey_data`. The config
    contains the keys that differ from the defaults, with the reasons. `reward` is the file with the
    user's reward, if answers cannot be compared. `memory` is the memory available to a run, in
    bytes.
    """
    words, needed, templated = about
    form = found.form
    why = found.why
    shipped = model in MODELS
    in_tags = shipped and form not in ("none", "code")
    if in_tags:
        form = "xml"
        why = "the shipped model answers in tags"
    adapters = ""
    if not needed:
        adapters = "quantized weights stay unchanged, and adapters are trained"
    elif 2 * needed > memory:
        adapters = f"training all weights would need {gigabytes(needed)} of {gigabytes(memory)}"
    rate = (1e-6, "")
    if adapters:
        rate = (1e-5, "adapters need ten times the learning rate of full weights")
    if in_tags:
        rate = (3e-4, "it is small")
    tokens = 16 if found.labels else _TOKENS.get(form, 512)
    system = None
    if found.labels and templated and not found.prompt:
        system = f"Reply with one of these alone, without any other word: {found.labels}"
    choices = f"One of {found.labels}.\n" if found.labels else ""
    nudge = "\n```python\n" if found.form == "code" else f"\n{choices}Answer:"
    continued = not (templated or found.prompt)
    scored = form != "none"
    # Key: value, reason. None and [data]'s defaults are left out.
    rows: dict[str, tuple[Any, str]] = {
        "run.name": (_name(model, data), "its files are in outputs/NAME"),
        "model.path": (model, words),
        "model.tune": ("lora" if adapters else None, adapters),
        "data.source": (data, ""),
        "data.eval_split": (
            found.eval_split,
            "the last tenth" if found.eval_split == "train" else "",
        ),
        "data.prompt": (found.prompt, "messages"),
        "data.completion": (found.completion, "the last turn, for grpo sft"),
        "data.question": (found.question or None, ""),
        "data.system_prompt": (
            "" if shipped else system,
            "the small model already knows the format" if shipped else "",
        ),
        "data.answer": (found.answer if scored else "", "" if scored else why),
        "data.prompt_form": ("raw" if continued else None, "a base model continues the text"),
        "data.nudge": (nudge if continued else None, "the end of the prompt"),
        "answer.form": (form if scored else None, why),
        "answer.ignore_case": (True if found.labels else None, ""),
        "reward.functions": (
            None if scored else [f"{reward}:reward"],
            "an example: replace it with your own, or set data.answer",
        ),
        "rollout.num_generations": (8, "completions per prompt"),
        "rollout.max_new_tokens": (40 if shipped else tokens, "more if completions are cut off"),
        "rollout.stop": (
            None if templated else [_ENDS.get(form, "\n\n")],
            "the end of the answer",
        ),
        "optim.learning_rate": rate,
        "optim.batch_size": (4, "prompts per step"),
        "optim.max_steps": (200, "0: all of the data"),
        "eval.every": (25, "updates"),
        "eval.samples": (100, "held-out problems"),
    }
    usual = {f"data.{name}": value for name, value in attrs.asdict(DataConfig()).items()}
    tables: dict[str, dict[str, Any]] = {}
    notes: dict[tuple[str, str], str] = {}
    for key, (value, note) in rows.items():
        section, name = key.split(".")
        if value not in (None, usual.get(key)):
            tables.setdefault(section, {})[name] = value
            notes[section, name] = note
    checked = Settings(label="grpo init", folder=Path())
    for section, table in tables.items():
        known_values((section,), table, checked)
    if checked.problems:  # the model or the data has a name or a text that no config may contain
        raise ConfigError(checked.problems)
    return toml_text(tables, notes, _HEADING)


def _name(model: str, data: str) -> str:
    parts = [Path(text).stem if Path(text).is_file() else Path(text).name for text in (model, data)]
    name = re.sub(r"[^a-z0-9._-]+", "-", "-".join(dict.fromkeys(parts)).lower())
    return name[:100].strip(".-") or "grpo"

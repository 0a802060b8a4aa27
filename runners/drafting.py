"""`grpo init`: what a model and a data set are, and the config that a person would write for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from runners.answers.values import parse_number, value_text
from runners.config.sections import DataConfig
from runners.data.messages import prompt_fault
from runners.data.prompts import gold_answer
from runners.data.remote_rows import hub_rows
from runners.data.rendering import has_template
from runners.data.row_files import SUFFIXES, Row, find_split, read_file
from runners.errors import UserError, first_line, gigabytes, listed, spell
from runners.files.json_files import read_json
from runners.models.folders import resolve_model
from runners.models.model_reader import load_tokenizer
from runners.quickstart import DATA, MODELS
from runners.sandbox.code_tests import read_tests

LOOKED = 500
"""Rows that are looked at, from the first."""
REWARD = '''\
"""The reward of {config}; higher is better. `grpo init` wrote this rule as an example: write yours."""


def reward(completions, **columns):
    """1.0 for at most 120 words that end as a sentence does, else 0.0; `columns` has the data's columns."""
    texts = [completion[-1]["content"].rstrip() for completion in completions]
    return [float(len(text.split()) <= 120 and text.endswith((".", "!", "?"))) for text in texts]
'''
_QUESTIONS = ("question", "problem", "prompt", "instruction", "query", "input", "text", "sentence")
_ANSWERS = (
    *("tests", "test_list", "answer", "final_answer", "solution", "label", "target", "gold", "ground_truth"),
    *("reference_answer", "output", "response", "completion", "chosen", "expected"),
)
_ENOUGH = 0.95  # of the answers have to have a form
_MOST_LABELS = 20
_SHORT = 40  # characters of an answer that can be compared as a whole
_LETTER = re.compile(r"\(?[A-Ja-j]\)?[.:]?")
_BYTES = 16  # a parameter, if all are trained: master, two moments, gradient
_TOKENS = {"letter": 256, "exact": 64, "none": 256}  # of a completion; else 512
_ENDS = {"exact": "\n", "code": "\n```"}  # of a base model's completion; else an empty line
_Row = tuple[str, Any, str]  # key, value, comment


@attrs.frozen
class DataSurvey:
    """A data set as `data` and `answer.form` of a config describe it."""

    eval_split: str  # "train": a part is held out
    question: str  # the column of texts; empty: `prompt` is used
    prompt: str  # the column of messages
    answer: str  # the column of answers; empty: none
    form: str  # as `answer.form`
    why: str  # what was found in the answers
    labels: tuple[str, ...]  # if a few short texts are the only answers: these


@attrs.frozen
class ModelSurvey:
    """A model as its folder describes it."""

    parameters: int
    bits: int | None  # of its packed weights; None: not packed
    has_template: bool  # a base model has none
    shipped: bool  # one of the small models in the package, which answer in tags

    @property
    def words(self) -> str:
        """The size, the bits and the kind, for people."""
        size = (
            f"{self.bits} bits a weight" if self.bits else f"{self.parameters / 1e6:,.3g} million parameters"
        )
        return f"{size}{'' if self.has_template else ', no chat template'}"


def survey_model(name: str) -> ModelSurvey:
    """Looks at a folder, a name on the Hub or a shipped model; of weights only shapes are read.

    Raises UserError as a run does for a model that cannot be used.
    """
    folder = resolve_model(name, "MODEL")
    packed = read_json(folder / "config.json").get("quantization")
    bits = packed.get("bits") if isinstance(packed, dict) else None
    count = 0
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            arrays: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
        except (RuntimeError, ValueError) as error:
            raise UserError(f"{file}: cannot be read as safetensors ({first_line(error)})") from error
        count += sum(array.size for array in arrays.values())
    return ModelSurvey(count, bits, has_template(load_tokenizer(folder)), name in MODELS)


def survey_data(source: str) -> DataSurvey:
    """Looks at the first rows of a file, a folder, a data set of the Hub, or a shipped one.

    Raises UserError if there are none, or no column holds a question.
    """
    eval_split, found = _rows(source)
    rows = [row for row in found[:LOOKED] if not row.fault]
    if not rows:
        raise UserError(f"{source}: expected rows with a question, found none that can be read")
    columns = {name: [row[name] for row in rows if row.get(name) is not None] for name in rows[0]}
    columns = {name: values for name, values in columns.items() if len(values) * 2 > len(rows)}
    talks = [
        name
        for name, values in columns.items()
        if all(isinstance(value, list) and value and not prompt_fault(value) for value in values)
    ]
    texts = [name for name, values in columns.items() if all(isinstance(value, str) for value in values)]
    # Of other names the one with the longest texts: answers are shorter than questions.
    longest = max(texts, key=lambda name: sum(map(len, columns[name])), default="")
    question = "" if talks else _named(texts, _QUESTIONS) or longest
    if not talks and not question:
        raise UserError(f"{source}: expected a column of questions, found {listed(list(columns))}")
    asked = (question, *talks[:1])
    others = [name for name in columns if name not in asked and all(map(gold_answer, columns[name]))]
    coded = _named([name for name in others if all(map(_has_tests, columns[name]))], _ANSWERS)
    plain = [name for name in others if not any(isinstance(value, list | dict) for value in columns[name])]
    answer = coded or _named(plain, _ANSWERS)
    values = [
        (gold_answer(value) or "") if isinstance(value, bool) else value_text(value)  # true, not True
        for value in (columns[answer] if answer else ())
    ]
    form, why = ("code", "tests of a program") if coded else _form(values)
    labels = tuple(sorted(set(values))) if why == "a few labels" else ()
    return DataSurvey(eval_split, question, talks[0] if talks else "", answer, form, why, labels)


def _rows(source: str) -> tuple[str, Sequence[Row]]:
    """The name of the evaluation split, and the training rows."""
    place = DATA.get(source) or Path(source).expanduser()
    if place.is_file():
        return "train", read_file(place)
    if not place.exists() and (source.startswith((".", "/", "~")) or place.suffix.lower() in SUFFIXES):
        raise UserError(f'DATA = "{source}": there is no such file or folder')

    def read(split: str) -> Sequence[Row]:
        if not place.exists():
            return hub_rows(DataConfig(source=source), split, "data.split")
        return [row for path in find_split(place, split, "data.split") for row in read_file(path)]

    def is_there(split: str) -> bool:
        try:
            return bool(read(split))
        except UserError:
            return False

    rows = read("train")
    return next(filter(is_there, ("test", "valid", "validation")), "train"), rows


def _has_tests(value: Any) -> bool:
    """Whether these are tests of a program: statements with `assert`, or inputs and outputs."""
    try:
        return any(isinstance(test, dict) or "assert" in test for test in read_tests(value))
    except ValueError:
        return False


def _named(columns: Sequence[str], known: Sequence[str]) -> str:
    """The column whose name comes first among known ones, whatever its capital letters; empty: none."""
    spelled = {column.lower(): column for column in columns}
    return next((spelled[name] for name in known if name in spelled), "")


def _form(answers: Sequence[str]) -> tuple[str, str]:
    """The form that nearly all answers have, as `answer.form`, and what was found."""
    texts = [answer.strip() for answer in answers]

    def most(has: Callable[[str], Any]) -> bool:
        return sum(bool(has(text)) for text in texts) >= _ENOUGH * len(texts)

    def is_number(text: str) -> bool:
        return parse_number(text.rpartition("####")[2].strip()) is not None

    if not texts:
        return "none", "no column of answers"
    labels = {text.lower() for text in texts}
    if most(is_number):
        return "last_number", "numbers"  # also behind ####, which a model that does not write #### has, too
    if most(lambda text: "####" in text):
        return "gsm8k", "answers behind ####"
    if most(lambda text: "\\boxed{" in text):
        return "boxed", "answers in \\boxed{}"
    if len(labels) > 1 and most(_LETTER.fullmatch):
        return "letter", f"the letters {', '.join(sorted({text.strip('(). :').upper() for text in texts}))}"
    if len(labels) <= min(_MOST_LABELS, len(texts) // 2) and max(map(len, texts)) <= _SHORT:
        return "exact", "a few labels"
    if most(lambda text: len(text) <= _SHORT and "\n" not in text):
        return "exact", "short texts"
    return "none", "long texts, which no rule compares"


def draft(model: str, data: str, about: ModelSurvey, found: DataSurvey, *, reward: str, memory: int) -> str:
    """The config as TOML: what differs from the defaults, and why.

    Args:
        model, data: as the user named them.
        about, found: what they are.
        reward: the file of the user's reward, where no answer is compared.
        memory: bytes that a run may use.
    """
    form, why, needed = found.form, found.why, _BYTES * about.parameters
    adapters, rate = "", (1e-6, "")
    if about.bits:
        adapters = "weights of few bits stay as they are, adapters learn"
    elif 2 * needed > memory:
        adapters = f"all weights would take {gigabytes(needed)} of {gigabytes(memory)}"
    if adapters:
        rate = (1e-5, "adapters take ten times the rate of full weights")
    if about.shipped and form not in ("none", "code"):
        form, why, rate = "xml", "the shipped model answers in tags", (3e-4, "it is small")
    tokens = 40 if about.shipped else 16 if found.labels else _TOKENS.get(form, 512)
    stop = [_ENDS.get(form, "\n\n")]
    tables: Mapping[str, list[_Row]] = {
        "run": [("name", _name(model, data), "its files are in outputs/NAME")],
        "model": [("path", model, about.words), *([("tune", "lora", adapters)] if adapters else [])],
        "data": [("source", data, ""), *_columns(found, about)],
        "answer": [("form", form, why), *([("ignore_case", True, "")] if found.labels else [])],
        "reward": [("functions", [f"{reward}:reward"], "an example: write yours")] if form == "none" else [],
        "rollout": [
            ("num_generations", 8, "completions of each prompt"),
            ("max_new_tokens", tokens, "more if completions are cut off"),
            *([] if about.has_template else [("stop", stop, "where the answer ends")]),
        ],
        "optim": [
            ("learning_rate", rate[0], rate[1]),
            ("batch_size", 4, "prompts of a step"),
            ("max_steps", 200, "0: all of the data"),
        ],
        "eval": [("every", 25, "updates"), ("samples", 100, "held-out problems")],
    }
    parts = ["# Written by `grpo init`. `grpo-run --explain SECTION` shows other keys and their defaults."]
    for name, rows in tables.items():
        lines = [f"{key} = {spell(value)}{why and '  # '}{why}" for key, value, why in rows]
        parts += ["\n".join([f"[{name}]", *lines])] if rows else []
    return "\n\n".join(parts) + "\n"


def _columns(found: DataSurvey, about: ModelSurvey) -> list[_Row]:
    """The keys of [data] that differ from their defaults."""
    labels = ", ".join(found.labels)
    rows: list[_Row] = []
    if found.eval_split != "test":
        rows.append(("eval_split", found.eval_split, "the last tenth" if found.eval_split == "train" else ""))
    if found.prompt:
        rows.append(("prompt", found.prompt, "messages"))
    elif found.question != "question":
        rows.append(("question", found.question, ""))
    if about.shipped:
        rows.append(("system_prompt", "", "the small model knows the form already"))
    elif labels and about.has_template and not found.prompt:
        rows.append(("system_prompt", f"Reply with one of these alone, without any other word: {labels}", ""))
    if found.form == "none":
        rows.append(("answer", "", found.why))
    elif found.answer != "answer":
        rows.append(("answer", found.answer, ""))
    if not about.has_template and not found.prompt:
        asks = f"\nOne of {labels}.\nAnswer:" if labels else "\nAnswer:"
        rows.append(("prompt_form", "raw", "a base model, without a chat template, continues the text"))
        rows.append(("nudge", "\n```python\n" if found.form == "code" else asks, "so the prompt ends"))
    return rows


def _name(model: str, data: str) -> str:
    parts = [Path(text).stem if Path(text).is_file() else Path(text).name for text in (model, data)]
    return re.sub(r"[^a-z0-9._-]+", "-", "-".join(dict.fromkeys(parts)).lower()).strip(".-") or "grpo"

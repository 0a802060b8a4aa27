"""A config as a person would have written it: what differs from the defaults, and why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from runners.answers.forms import answer_form
from runners.data.messages import Message, conversation
from runners.drafting.data_survey import DataSurvey
from runners.drafting.model_survey import ModelSurvey
from runners.errors import gigabytes, spell

REWARD = '''\
"""The reward of {config}; higher is better. `grpo init` wrote this rule as an example: write yours."""


def reward(completions, **columns):
    """1.0 for at most 120 words that end as a sentence does, else 0.0; `columns` has the data's columns."""
    texts = [completion[-1]["content"].rstrip() for completion in completions]
    return [float(len(text.split()) <= 120 and text.endswith((".", "!", "?"))) for text in texts]
'''
_FIRST = (
    "# Written by `grpo init`. All other keys have their defaults: `grpo-run --explain SECTION` shows them."
)
_BYTES = 16  # a parameter, if all are trained: master, two moments, gradient
_PROMPT = 512  # tokens: the default of data.max_prompt_length
_ASKS = {"code": "\n```python\n"}  # how a base model's prompt ends; else as the next line
_ASKS_ANSWER, _ASKS_LABELS = "\nAnswer:", "\nOne of {labels}.\nAnswer:"
_LENGTHS = {"letter": 256, "exact": 64, "none": 256, "code": 512}
_ENDS = {"exact": "\n", "code": "\n```"}  # of a base model's completion; else an empty line
_LEAST = 256  # tokens of a completion that works a problem out
_Row = tuple[str, Any, str]  # key, value, comment


def draft(model: str, data: str, about: ModelSurvey, found: DataSurvey, *, reward: str, memory: int) -> str:
    """The config as TOML.

    Args:
        model, data: as the user named them.
        about, found: what they are.
        reward: the file of the user's reward, where no answer is compared.
        memory: bytes that a run may use.
    """
    adapters = _adapters(about, memory)
    rate: tuple[float, str] = (
        (1e-5, "adapters take ten times the rate of full weights") if adapters else (1e-6, "")
    )
    form, why = found.form, found.why
    if about.shipped and form not in ("none", "code"):
        form, why, rate = "xml", "the shipped model answers in tags", (3e-4, "it is small")
    own: list[_Row] = [("functions", [f"{reward}:reward"], "an example stands there: write yours")]
    labels: list[_Row] = [("ignore_case", True, "")] if found.labels else []
    tables: dict[str, list[_Row]] = {
        "run": [("name", _name(model, data), "its files are in outputs/NAME")],
        "model": [("path", model, about.words), *([("tune", "lora", adapters)] if adapters else [])],
        "data": [("source", data, ""), *_columns(found, about), *_longest(found, about, form)],
        "answer": [("form", form, why), *labels],
        "reward": own if form == "none" else [],
        "rollout": [("num_generations", 8, "completions of each prompt"), *_length(found, about, form)],
        "optim": [
            ("learning_rate", rate[0], rate[1]),
            ("batch_size", 4, "prompts of a step"),
            ("max_steps", 200, "0: all of the data"),
        ],
        "eval": [("every", 25, "updates"), ("samples", 100, "held-out problems")],
    }
    parts = [_FIRST, *(f"[{name}]\n{_written(rows)}" for name, rows in tables.items() if rows)]
    return "\n\n".join(parts) + "\n"


def _written(rows: list[_Row]) -> str:
    lines = [f"{key} = {spell(value)}" for key, value, _ in rows]
    width = max((len(line) for line, (_, _, why) in zip(lines, rows, strict=True) if why), default=0)
    comments = [f"  # {why}" if why else "" for _, _, why in rows]
    return "\n".join(f"{line:<{width}}{why}".rstrip() for line, why in zip(lines, comments, strict=True))


def _adapters(about: ModelSurvey, memory: int) -> str:
    """Why adapters are trained and not all weights; empty: all weights."""
    if about.bits:
        return "weights of few bits stay as they are, adapters learn"
    needed = _BYTES * about.parameters
    return f"all weights would take {gigabytes(needed)} of {gigabytes(memory)}" if 2 * needed > memory else ""


def _columns(found: DataSurvey, about: ModelSurvey) -> list[_Row]:
    rows: list[_Row] = []
    words = ", ".join(found.labels)
    if found.split != "train":
        rows.append(("split", found.split, ""))
    if found.eval_split == found.split:
        rows.append(("eval_split", found.eval_split, "the last tenth is held out"))
    elif found.eval_split != "test":
        rows.append(("eval_split", found.eval_split, ""))
    if found.prompt:
        rows.append(("prompt", found.prompt, "messages"))
    elif found.question != "question":
        rows.append(("question", found.question, ""))
    if about.shipped:
        rows.append(("system_prompt", "", "the small model knows the form already"))
    elif found.labels and about.has_template and not found.prompt:
        rows.append(("system_prompt", f"Reply with one of these alone, without any other word: {words}", ""))
    if found.form == "none":
        rows.append(("answer", "", found.why))
    elif found.answer != "answer":
        rows.append(("answer", found.answer, ""))
    if not about.has_template and not found.prompt:
        rows.append(("prompt_form", "raw", "a base model, without a chat template, continues the text"))
        asks = _ASKS_LABELS.format(labels=words) if words else _ASKS_ANSWER
        rows.append(("nudge", _ASKS.get(found.form, asks), "" if words else "so the prompt ends"))
    return rows


def _longest(found: DataSurvey, about: ModelSurvey, form: str) -> list[_Row]:
    """The limit of prompts, if one is longer than the default."""
    kind = answer_form(form)
    system = kind.instruction if kind else ""
    prompts: list[tuple[Message, ...]] = []
    for row in found.rows:
        messages = conversation(row[found.prompt or found.question], "" if found.prompt else system)
        prompts.append(messages)
    longest = about.longest(sorted(prompts, key=lambda messages: -len(str(messages)))[:8])
    why = f"the longest of the first {len(found.rows)} has {longest} tokens"
    return [("max_prompt_length", _rounded(longest), why)] if longest > _PROMPT else []


def _length(found: DataSurvey, about: ModelSurvey, form: str) -> list[_Row]:
    """The limit of completions, where the answers show another one than the default."""
    ends = [] if about.has_template else [("stop", [_ENDS.get(form, "\n\n")], "where the answer ends")]
    if about.shipped:
        return [("max_new_tokens", 40, "enough for it")]
    if form in _LENGTHS:
        return [("max_new_tokens", 16 if found.labels else _LENGTHS[form], ""), *ends]
    longest = max(map(about.count, found.answers), default=0)
    why = f"twice the longest answer of the data, {longest} tokens" if 2 * longest > _LEAST else ""
    return [("max_new_tokens", max(_LEAST, _rounded(2 * longest)), why), *ends]


def _rounded(tokens: int) -> int:
    return -(-tokens // 64) * 64


def _name(model: str, data: str) -> str:
    parts = [Path(text).stem if Path(text).is_file() else Path(text).name for text in (model, data)]
    return re.sub(r"[^a-z0-9._-]+", "-", "-".join(dict.fromkeys(parts)).lower()).strip(".-") or "grpo"

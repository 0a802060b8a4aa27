"""What was measured of a machine and a model, kept between runs: tuning.json in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from runners.files.cache_folder import cache_folder
from runners.files.durable import save_text

CACHE_FORMAT = 2  # a new one forgets everything: for changes to decoding or to its measurement
MOST_ANSWERS = 200  # answers; the oldest go first


@attrs.frozen
class DecodeChoice:
    """How completions are decoded; see `grpo_fn.generate`."""

    launch: str  # as in `machine.launch_modes`
    check_every: int  # steps between looks at which rows have ended
    max_batch: int  # rows together; 0: all


def cache_file() -> Path:
    """Where answers are kept."""
    return cache_folder() / "tuning.json"


def recall(file: Path, facts: Mapping[str, Any]) -> tuple[DecodeChoice | None, str | None]:
    """The answer for these facts, if there is one; and what is wrong with the file, if something is."""
    found, fault = recall_answer(file, facts)
    if found is None:
        return None, fault
    try:
        answer = DecodeChoice(**found)
    except TypeError:
        return None, f"{file}: an answer in it is damaged; it is measured again"
    whole = isinstance(answer.check_every, int) and isinstance(answer.max_batch, int)
    known = answer.launch in ("eval", "async", "split")
    if not known or not whole or answer.check_every < 1 or answer.max_batch < 0:
        return None, f"{file}: an answer in it is damaged; it is measured again"
    return answer, None


def remember(file: Path, facts: Mapping[str, Any], answer: DecodeChoice) -> str | None:
    """Keeps an answer; returns why it could not be kept, or None."""
    return remember_answer(file, facts, attrs.asdict(answer))


def recall_answer(file: Path, facts: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """`recall` of an answer of any kind, as an object of JSON that its reader has to check."""
    answers, fault = _read(file)
    entry = answers.get(_name(facts))
    if entry is None:
        return None, fault
    if not isinstance(entry.get("answer"), dict):
        return None, f"{file}: an answer in it is damaged; it is measured again"
    return entry["answer"], None


def remember_answer(file: Path, facts: Mapping[str, Any], answer: Mapping[str, Any]) -> str | None:
    """`remember` of an answer of any kind."""
    answers, _ = _read(file)
    answers.pop(_name(facts), None)
    answers[_name(facts)] = {"facts": dict(facts), "answer": dict(answer)}
    newest = dict(list(answers.items())[-MOST_ANSWERS:])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_text(file, json.dumps({"format": CACHE_FORMAT, "answers": newest}, indent=1) + "\n")
    except OSError as error:
        return f"{file} cannot be written ({error.strerror or error}): the next run measures again"
    return None


def _name(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()[:24]


def _read(file: Path) -> tuple[dict[str, Any], str | None]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, None
    except OSError as error:
        return {}, f"{file} cannot be read ({error.strerror or error})"
    except ValueError:  # no JSON, or no UTF-8
        return {}, f"{file} is damaged; it is written anew"
    if not isinstance(found, dict) or "format" not in found:
        return {}, f"{file} is damaged; it is written anew"
    if found["format"] != CACHE_FORMAT:
        return {}, None
    answers = found.get("answers")
    if not isinstance(answers, dict) or not all(isinstance(entry, dict) for entry in answers.values()):
        return {}, f"{file} is damaged; it is written anew"
    return answers, None

"""Measurements of a machine and a model, kept between runs in tuning.json in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runners.files.cache_folder import cache_folder
from runners.files.durable import save_text

CACHE_FORMAT = 3  # increase it if the comparison changes: old answers are then ignored
MOST_ANSWERS = 200  # answers; the oldest go first


def cache_file() -> Path:
    """Where answers are kept."""
    return cache_folder() / "tuning.json"


def recall(file: Path, facts: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """The answer for these facts, if there is one, and the fault of the file, if there is one.

    The answer is a JSON object that the caller has to check.
    """
    answers, fault = _read(file)
    entry = answers.get(_name(facts))
    if entry is None:
        return None, fault
    if not isinstance(entry.get("answer"), dict):
        return None, f"{file}: an answer in it is damaged; it is measured again"
    return entry["answer"], None


def remember(file: Path, facts: Mapping[str, Any], answer: Mapping[str, Any]) -> str | None:
    """Keeps an answer, an object of JSON; returns why it could not be kept, or None."""
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

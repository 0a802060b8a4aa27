"""The first use of a model's tokenizer and chat template: for a process that can be ended.

Importing this module imports transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from runners.machine.startup import import_transformers_without_torch
from runners.tokenization.tokenizer_check import files_of

import_transformers_without_torch()
from transformers.utils.chat_template_utils import render_jinja_template  # noqa: E402

_MAX_TEMPLATE = 1 << 20  # characters; the longest in use have some twenty thousand
_MAX_PROMPT = 1 << 20  # characters of a short conversation
_GROWTH = 16  # tokens for a character; ideographs and emoji have at most four
_WORDS = "Ida has 12 cards. Eva has 3 times as many, and they sell 9 of them: how many are left?\n" * 4
_USER, _SYSTEM = {"role": "user", "content": _WORDS}, {"role": "system", "content": _WORDS}
_TALK = [_SYSTEM, _USER, {"role": "assistant", "content": _WORDS}, _USER]


def first_use(folder: str) -> str:
    """In the child process: renders a few conversations and tokenizes a text; the fault, or ""."""
    try:
        for template, names in _templates(Path(folder)):
            if fault := _rendered(template, names):
                return fault
        if (Path(folder) / "tokenizer.json").is_file():
            tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
            tokens = tokenizer.encode(_WORDS).ids
            most = max(len(tokens), len(tokenizer.decode(tokens)))
            if most > _GROWTH * len(_WORDS):
                return f"its tokenizer makes {most:,} tokens or letters of {len(_WORDS)} characters"
    except MemoryError:
        raise
    except BaseException:  # what is merely wrong is reported at its real use; Rust's panics are no Exceptions
        pass
    return ""


def _templates(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The templates of the files, and the special tokens that they may name."""
    config, other = _json(folder / "tokenizer_config.json"), _json(folder / "chat_template.json")
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    names = {key: each.get("content") if isinstance(each, dict) else each for key, each in tokens.items()}
    stated = config.get("chat_template")
    for file in files_of(folder):
        if file.suffix == ".jinja":
            yield file.read_text(encoding="utf-8", errors="replace"), names
    for each in (*(stated if isinstance(stated, list) else [stated]), other.get("chat_template")):
        text = each.get("template") if isinstance(each, dict) else each
        if isinstance(text, str):
            yield text, names


def _json(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def _rendered(text: str, names: dict[str, Any]) -> str:
    """The fault of a template, or ""."""
    if len(text) > _MAX_TEMPLATE:
        return f"its chat template: expected at most {_MAX_TEMPLATE:,} characters, found {len(text):,}"
    for messages in ([_USER], _TALK[:2], _TALK):
        try:
            (made,), _ = render_jinja_template(
                [messages], chat_template=text, add_generation_prompt=True, **names
            )
        except MemoryError:
            raise
        except Exception:
            continue  # it refuses a role, or is faulty
        if len(made) > _MAX_PROMPT:
            return f"its chat template makes {len(made):,} characters of a short conversation"
    return ""

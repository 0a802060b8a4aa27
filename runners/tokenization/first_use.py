"""The first use of a model's tokenizer and chat template: for a process that can be ended.

Importing this module imports transformers.
"""

from __future__ import annotations

import json
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
    for use in (_templates_fault, _tokenizer_fault):
        try:
            if fault := use(Path(folder)):
                return fault
        except MemoryError:
            raise
        except BaseException:  # what is merely wrong is reported at its real use
            continue  # Rust's panics are no Exceptions
    return ""


def _tokenizer_fault(folder: Path) -> str:
    if not (folder / "tokenizer.json").is_file():
        return ""
    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokens = tokenizer.encode(_WORDS).ids
    most = max(len(tokens), len(tokenizer.decode(tokens)))
    if most > _GROWTH * len(_WORDS):
        return f"its tokenizer makes {most:,} tokens or letters of {len(_WORDS)} characters"
    return ""


def _templates_fault(folder: Path) -> str:
    files = [file for file in files_of(folder) if file.name != "tokenizer.json"]
    for file in sorted(files, key=lambda file: file.suffix == ".json"):  # a faulty one comes last
        text = file.read_text(encoding="utf-8", errors="replace")
        templates: Any = [text]
        if file.suffix == ".json":
            stated = json.loads(text)
            templates = stated.get("chat_template") if isinstance(stated, dict) else None
        for each in templates if isinstance(templates, list) else [templates]:
            template = each.get("template") if isinstance(each, dict) else each
            if isinstance(template, str) and (fault := _rendered(template)):
                return fault
    return ""


def _rendered(text: str) -> str:
    """The fault of a template, or ""."""
    if len(text) > _MAX_TEMPLATE:
        return f"its chat template: expected at most {_MAX_TEMPLATE:,} characters, found {len(text):,}"
    for messages in ([_USER], _TALK[:2], _TALK):
        try:
            (made,), _ = render_jinja_template([messages], chat_template=text, add_generation_prompt=True)
        except MemoryError:
            raise
        except Exception:
            continue  # it refuses a role, or is faulty
        if len(made) > _MAX_PROMPT:
            return f"its chat template makes {len(made):,} characters of a short conversation"
    return ""

"""Uses a model's tokenizer and chat template for the first time, in a process that can be killed.

Importing this module imports transformers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from runners.machine.startup import import_transformers_without_torch
from runners.tokenization.tokenizer_check import files_of

import_transformers_without_torch()
from transformers.utils.chat_template_utils import render_jinja_template  # noqa: E402

_WORDS = "Ida has 12 cards. Eva has 3 times as many, and they sell 9: how many are left?\n" * 4
_USER = {"role": "user", "content": _WORDS}
_SYSTEM = {"role": "system", "content": _WORDS}
_TALK = [_SYSTEM, _USER, {"role": "assistant", "content": _WORDS}, _USER]


def first_use(folder: str) -> bool:
    """Renders a few conversations and tokenizes a text, in the child process. Returns True unless a
    limit ends the process.
    """
    for file in files_of(Path(folder)):
        _attempt(_tokenize if file.name == "tokenizer.json" else _render, file)
    return True


def _attempt(use: Callable[..., object], *arguments: Any, **options: Any) -> None:
    try:
        use(*arguments, **options)
    except MemoryError:
        raise
    except BaseException:  # a fault is reported at its real use; Rust's panics are no Exceptions
        pass


def _tokenize(file: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.decode(tokenizer.encode(_WORDS).ids)


def _render(file: Path) -> None:
    found: Any = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".json":
        found = json.loads(found)["chat_template"]
    found = [*found.values()] if isinstance(found, dict) else found
    for named in found if isinstance(found, list) else [found]:
        template = named["template"] if isinstance(named, dict) else named
        for messages in ([_USER], _TALK[:2], _TALK):  # some templates refuse a role
            _attempt(
                render_jinja_template,
                [messages],
                chat_template=template,
                add_generation_prompt=True,
            )

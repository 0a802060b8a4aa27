"""The first use of a model's tokenizer and chat template: for a process that can be ended.

Importing this module imports transformers.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from runners.machine.startup import import_transformers_without_torch
from runners.tokenization.tokenizer_check import files_of
from runners.tokenization.tokenizer_pickle import read_encoding

import_transformers_without_torch()
from transformers.utils.chat_template_utils import render_jinja_template  # noqa: E402

_MAX_TEMPLATE = 1 << 20  # characters; the longest in use have some twenty thousand
_MAX_PROMPT = 1 << 20  # characters of a short conversation
_GROWTH = 16  # tokens for a character; ideographs and emoji have at most four
_WORDS = "Ida has 12 cards. Eva has 3 times as many, and they sell 9 of them: how many are left?\n"
_LETTERS = string.printable + "äßéñøйжάの漢字한ع…€–“”½²\u00a0\u200b\u200d\ufe0f😀"


def first_use(part: str, folder: str, pickled: str) -> str:
    """In the child process: renders a few conversations, or tokenizes some texts; the fault, or "".

    `pickled`: nanochat's tokenizer.pkl, or "".
    """
    try:
        if part == "chat template":
            return next(filter(None, (_rendered(*each) for each in _templates(Path(folder)))), "")
        if part and pickled:
            encoding = read_encoding(Path(pickled))
            return _tokenized(
                lambda text: encoding.encode(text, allowed_special=set(), disallowed_special=())
            )
        if part and (Path(folder) / "tokenizer.json").is_file():
            tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
            return _tokenized(lambda text: tokenizer.encode(text).ids, tokenizer.decode)
    except MemoryError:
        raise
    except Exception:  # a file that is merely wrong is reported at its real first use
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
    user, system = {"role": "user", "content": _WORDS * 4}, {"role": "system", "content": _WORDS}
    turns = [user, {"role": "assistant", "content": _WORDS}, user]
    for messages in ([user], [system, user], [system, *turns]):
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


def _tokenized(encode: Callable[[str], Sequence[int]], decode: Callable[[Any], str] = lambda _: "") -> str:
    """The fault of a tokenizer with words, and with runs of each letter, where it would grow most; or ""."""
    # Another character follows each run: patterns that end with the text then try everything.
    runs = [letter * 64 + ("!" if letter != "!" else "a") for letter in dict.fromkeys(_LETTERS)]
    for text in (_WORDS * 8, *runs):
        try:
            tokens = encode(text)
            most = max(len(tokens), len(decode(tokens)))
        except MemoryError:
            raise
        except BaseException as error:  # Rust's panics are not Exceptions
            return " ".join(f"the tokenizer fails on a text: {error}".split())[:300]
        if most > _GROWTH * len(text) + 64:
            return f"the tokenizer makes {most:,} tokens or letters of {len(text)} characters"
    return ""

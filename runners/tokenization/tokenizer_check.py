"""Checks, before their first use, the time and memory of a model's tokenizer and chat template.

Neither library has such a limit: a template of one line can ask for gigabytes, and so can a tokenizer.json of
some kilobytes. So their first use is in a process that can be ended. That costs some tenths of a second, once
for each content: contents that have passed are remembered in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import tokenizers

from runners.errors import UserError
from runners.files.cache_folder import cache_folder
from runners.machine.bounded_process import BoundedFunction
from runners.quickstart import MODEL_DIR
from runners.tokenization.tokenizer_pickle import read_encoding

_SECONDS, _MEMORY = 2.0, 512_000_000  # and for each byte of the files:
_SECONDS_A_BYTE, _MEMORY_A_BYTE = 0.4e-6, 16
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"
_MAX_TEMPLATE = 1 << 20  # characters; the longest in use have some twenty thousand
_MAX_PROMPT = 1 << 20  # characters of a short conversation
_GROWTH = 16  # tokens for a character; ideographs and emoji have at most four
_WORDS = "Ida has 12 cards. Eva has 3 times as many, and they sell 9 of them: how many are left?\n"
_LETTERS = string.printable + "äßéñøйжάの漢字한ع…€–“”½²\u00a0\u200b\u200d\ufe0f😀"


def check_tokenizer(folder: Path, pickled: Path | None = None) -> None:
    """Raises UserError, in one line, if the first use takes too much time or memory.

    `pickled`: nanochat's tokenizer.pkl, if that is the tokenizer. The shipped model is not checked, nor is a
    content that has passed before.
    """
    if folder.resolve() == MODEL_DIR.resolve():
        return
    files = [*_files_of(folder), *([pickled] if pickled else [])]
    seen = cache_folder() / "checked" / _digest(files)
    if seen.exists():
        return
    size = sum(file.stat().st_size for file in files)
    seconds, memory = _SECONDS + _SECONDS_A_BYTE * size, _MEMORY + _MEMORY_A_BYTE * size
    with closing(BoundedFunction(f"{__name__}:first_use", seconds=seconds, memory=memory)) as use:
        if use("", "", "") is None:  # no process can be started: nothing is checked
            return
        for part in ("chat template", "tokenizer"):
            fault = use(part, str(folder), str(pickled or ""))
            if fault is None:
                limits = f"{seconds:.3g} s or {memory / 1e6:,.0f} MB"
                fault = f"its {part} takes more than {limits} for a short text, or ends its process"
            if fault:
                raise UserError(f"{folder}: {fault}")
    with suppress(OSError):  # a folder that cannot be written to: checked again later
        seen.parent.mkdir(parents=True, exist_ok=True)
        seen.touch()


def _files_of(folder: Path) -> list[Path]:
    named = [folder / name for name in _FILES]
    return [file for file in (*named, *sorted(folder.glob(_MORE_TEMPLATES))) if file.is_file()]


def _digest(files: list[Path]) -> str:
    versions = map(importlib.metadata.version, ("jinja2", "tokenizers", "tiktoken"))
    total = hashlib.sha256(" ".join(versions).encode())
    for file in files:
        with suppress(OSError):  # the next reader reports the fault
            content = file.read_bytes()
            total.update(f"\0{file.name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


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
    for file in _files_of(folder):
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
    variables = {"add_generation_prompt": True, "tools": None, "documents": None, **names}
    for messages in ([user], [system, user], [system, *turns]):
        try:
            made = _environment().from_string(text).render(**variables, messages=messages)
        except MemoryError:
            raise
        except Exception:
            continue  # it refuses a role, or is faulty
        if len(made) > _MAX_PROMPT:
            return f"its chat template makes {len(made):,} characters of a short conversation"
    return ""


def _environment() -> Any:
    """transformers' sandbox, without the import of transformers."""

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 (as jinja2 wants it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: "1 Jan 2026"}
    return environment


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

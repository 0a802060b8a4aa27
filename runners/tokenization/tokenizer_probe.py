"""The first use of a tokenizer and its chat template, in a separate process (`machine.bounded_process`).

It imports little besides the libraries that do the work, because it delays a model's first use. It prints the
phase that begins, and a line that starts with FAULT if something is wrong.
"""

from __future__ import annotations

import json
import os
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from runners.machine.bounded_process import OUT_OF_MEMORY, limit

FAULT = "fault: "
READY, TEMPLATE, READING, TEXT = "ready", "template", "reading", "text"
UNREADABLE = 1  # the exit code if a file cannot be read
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"
MAX_TEMPLATE = 1 << 20  # characters; the longest in use have some twenty thousand
MAX_PROMPT = 1 << 20  # characters of a short conversation
_GROWTH = 16  # tokens for a character; ideographs and emoji have at most four
_WORDS = "Ida has 12 cards. Eva has 3 times as many, and they sell 9 of them: how many are left?\n"
_LETTERS = string.printable + "äßéñøйжάの漢字한ع…€–“”½²\u00a0\u200b\u200d\ufe0f😀"


def files_of(folder: Path) -> list[Path]:
    """The existing files of a model folder that are checked."""
    named = [folder / name for name in _FILES]
    return [file for file in (*named, *sorted(folder.glob(_MORE_TEMPLATES))) if file.is_file()]


def main(folder: str, pickled: str, seconds: str, memory: str) -> None:
    """Renders a few conversations and tokenizes some texts; `pickled`: nanochat's tokenizer.pkl, or ""."""
    place = Path(folder)
    import jinja2.sandbox  # noqa: F401 (before the limits)
    import tokenizers

    if pickled:
        from runners.tokenization import tokenizer_pickle
    limit(float(seconds), int(memory))
    _report(READY)
    try:
        _report(TEMPLATE)
        try:
            for text, names in _templates(place):
                _render_all(text, names)
        except MemoryError:
            raise
        except Exception:  # a file that is merely wrong is reported at its real first use
            pass
        _report(READING)
        if pickled:
            encoding = tokenizer_pickle.read_encoding(Path(pickled))
            _texts(lambda text: encoding.encode(text, allowed_special=set(), disallowed_special=()))
        elif (place / "tokenizer.json").is_file():
            tokenizer = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
            _texts(lambda text: tokenizer.encode(text).ids, tokenizer.decode)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception:
        os._exit(UNREADABLE)


def _report(line: str) -> None:
    print(line, flush=True)


def _fault(text: str) -> None:
    _report(FAULT + " ".join(text.split())[:300])
    raise SystemExit(2)


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


def _render_all(text: str, names: dict[str, Any]) -> None:
    if len(text) > MAX_TEMPLATE:
        _fault(f"its chat template: expected at most {MAX_TEMPLATE:,} characters, found {len(text):,}")
    template = _environment().from_string(text)
    user, system = {"role": "user", "content": _WORDS * 4}, {"role": "system", "content": _WORDS}
    turns = [user, {"role": "assistant", "content": _WORDS}, user]
    variables = {"add_generation_prompt": True, "tools": None, "documents": None, **names}
    for messages in ([user], [system, user], [system, *turns]):
        try:
            made = template.render(**variables, messages=messages)
        except MemoryError:
            raise
        except Exception:
            continue  # it refuses a role, or is faulty
        if len(made) > MAX_PROMPT:
            _fault(f"its chat template makes {len(made):,} characters of a short conversation")


def _environment() -> Any:
    """transformers' sandbox, without the import of transformers."""
    from jinja2 import TemplateError, ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        tags = {"generation"}  # noqa: RUF012 (as jinja2 wants it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: "1 Jan 2026"}
    return environment


def _texts(encode: Callable[[str], Sequence[int]], decode: Callable[[Any], str] = lambda tokens: "") -> None:
    """Tokenizes words, and runs of each letter, where a fault would grow most."""
    _report(TEXT)
    # Another character follows each run: patterns that end with the text then try everything.
    runs = [letter * 64 + ("!" if letter != "!" else "a") for letter in dict.fromkeys(_LETTERS)]
    for text in (_WORDS * 8, *runs):
        try:
            tokens = encode(text)
            most = max(len(tokens), len(decode(tokens)))
        except MemoryError:
            raise
        except BaseException as error:  # Rust's panics are not Exceptions
            _fault(f"the tokenizer fails on a text: {error}")
            return
        if most > _GROWTH * len(text) + 64:
            _fault(f"the tokenizer makes {most:,} tokens or letters of {len(text)} characters")


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}

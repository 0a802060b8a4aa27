"""Checks, before their first use, the time and memory of a model's tokenizer and chat template.

Neither library has such a limit: a template of one line can ask for gigabytes, and so can a tokenizer.json of
some kilobytes. So their first use is in a process that can be ended. That costs a second, once for each
content: contents that have passed are remembered in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from contextlib import closing, suppress
from pathlib import Path

from runners.errors import UserError
from runners.files.cache_folder import remember, remembers
from runners.machine.bounded_process import BoundedFunction
from runners.quickstart import MODEL_DIR

_SECONDS, _MEMORY = 2.0, 512_000_000  # and for each byte of the files:
_SECONDS_A_BYTE, _MEMORY_A_BYTE = 0.4e-6, 16
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"


def check_tokenizer(folder: Path) -> None:
    """Raises UserError, in one line, if the first use takes too much time or memory.

    The shipped model is not checked, nor is a content that has passed before.
    """
    if folder.resolve() == MODEL_DIR.resolve():
        return
    files = files_of(folder)
    digest = _digest(files)
    if remembers("checked", digest):
        return
    size = sum(file.stat().st_size for file in files)
    seconds, memory = _SECONDS + _SECONDS_A_BYTE * size, _MEMORY + _MEMORY_A_BYTE * size
    with closing(
        BoundedFunction("runners.tokenization.first_use:first_use", seconds=seconds, memory=memory)
    ) as use:
        if use("/nowhere") is None:  # no process can be started: nothing is checked
            return
        fault = use(str(folder))
    if fault is None:
        limits = f"{seconds:.3g} s or {memory / 1e6:,.0f} MB"
        fault = f"its tokenizer or chat template takes more than {limits} for a short text"
    if fault:
        raise UserError(f"{folder}: {fault}")
    remember("checked", digest)


def files_of(folder: Path) -> list[Path]:
    """The files of a model's folder that its tokenizer and template are read from."""
    named = [folder / name for name in _FILES]
    return [file for file in (*named, *sorted(folder.glob(_MORE_TEMPLATES))) if file.is_file()]


def _digest(files: list[Path]) -> str:
    versions = map(importlib.metadata.version, ("jinja2", "tokenizers"))
    total = hashlib.sha256(" ".join(versions).encode())
    for file in files:
        with suppress(OSError):  # the next reader reports the fault
            content = file.read_bytes()
            total.update(f"\0{file.name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()

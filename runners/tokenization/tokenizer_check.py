"""Checks, before their first use, the time and memory of a model's tokenizer and chat template.

Neither library has such a limit: a template of one line can ask for gigabytes, and so can a tokenizer.json of
some kilobytes. So their first use is in a process that can be ended (`tokenizer_probe`). That costs some
tenths of a second, once for each content: contents that have passed are remembered in the user's cache
folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from contextlib import suppress
from pathlib import Path

from runners.errors import UserError
from runners.files.cache_folder import cache_folder
from runners.machine.bounded_process import run_bounded
from runners.quickstart import MODEL_DIR
from runners.tokenization.tokenizer_probe import FAULT, READY, TEMPLATE, files_of

_SECONDS, _MEMORY = 2.0, 512_000_000  # and for each byte of the files:
_SECONDS_A_BYTE, _MEMORY_A_BYTE = 0.4e-6, 16


def check_tokenizer(folder: Path, pickled: Path | None = None) -> None:
    """Raises UserError, in one line, if the first use takes too much time or memory.

    `pickled`: nanochat's tokenizer.pkl, if that is the tokenizer. The shipped model is not checked, nor is a
    content that has passed before.
    """
    if folder.resolve() == MODEL_DIR.resolve():
        return
    files = [*files_of(folder), *([pickled] if pickled else [])]
    seen = cache_folder() / "checked" / _digest(files)
    if seen.exists():
        return
    size = sum(file.stat().st_size for file in files)
    seconds, memory = _SECONDS + _SECONDS_A_BYTE * size, _MEMORY + _MEMORY_A_BYTE * size
    ending = run_bounded(
        "runners.tokenization.tokenizer_probe",
        *(str(folder), str(pickled or ""), f"{seconds:.3f}", str(memory)),
        seconds=seconds,
        memory=memory,
    )
    stated = [line.removeprefix(FAULT) for line in ending.lines if line.startswith(FAULT)]
    # Without READY nothing was checked: no process could be started, or a package is missing.
    what = "its chat template" if ending.lines[-1:] == (TEMPLATE,) else "its tokenizer"
    if not stated and READY in ending.lines:
        if ending.over == "time":
            stated = [f"{what} computes for more than {seconds:.3g} s over a short text"]
        elif ending.over == "memory":
            stated = [f"{what} takes more than {memory / 1e6:,.0f} MB for a short text"]
        elif ending.code < 0:
            stated = [f"{what} ends the process that uses it (signal {-ending.code})"]
    if stated:
        raise UserError(f"{folder}: {stated[0]}")
    if ending.code == 0:
        with suppress(OSError):  # a folder that cannot be written to: checked again later
            seen.parent.mkdir(parents=True, exist_ok=True)
            seen.touch()


def _digest(files: list[Path]) -> str:
    versions = map(importlib.metadata.version, ("jinja2", "tokenizers", "tiktoken"))
    total = hashlib.sha256(" ".join(versions).encode())
    for file in files:
        with suppress(OSError):  # the next reader reports the fault
            content = file.read_bytes()
            total.update(f"\0{file.name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()

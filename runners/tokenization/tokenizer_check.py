"""Limits the time and memory of a model's tokenizer and chat template at their first use.

The libraries have no such limits, but a one-line template or a tokenizer.json of a few kilobytes
can require gigabytes. Therefore, the first use happens in a process that can be killed. The process
takes a second, once per file content. Contents that have passed are recorded in the user's cache
folder.
"""

import hashlib
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from runners.errors import UserError
from runners.files.own_folder import remember, remembers
from runners.machine.bounded_process import BoundedFunction
from runners.quickstart import MODEL_DIR

_FIRST_USE = "runners.tokenization.first_use:first_use"
_SECONDS = 2.0
_MEMORY = 512_000_000
# And for each byte of the files:
_SECONDS_A_BYTE = 0.4e-6
_MEMORY_A_BYTE = 16
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"


def check_tokenizer(folder: Path) -> None:
    """Raises a one-line UserError if the first use takes too much time or memory.

    The shipped model and contents that have passed before are not checked.
    """
    if folder.resolve() == MODEL_DIR.resolve():
        return
    contents = {file.name: file.read_bytes() for file in files_of(folder)}
    total = hashlib.sha256(" ".join(map(version, ("jinja2", "tokenizers"))).encode())
    for name, content in contents.items():
        total.update(f"\0{name}\0{len(content)}\0".encode() + content)
    if remembers("checked", total.hexdigest()):
        return
    size = sum(map(len, contents.values()))
    seconds = _SECONDS + _SECONDS_A_BYTE * size
    memory = _MEMORY + _MEMORY_A_BYTE * size
    with closing(BoundedFunction(_FIRST_USE, seconds=seconds, memory=memory)) as use:
        if use("/nowhere") is None:  # no process can be started: nothing is checked
            return
        if use(str(folder)) is None:
            raise UserError(
                f"{folder}: its tokenizer or chat template needs more than {seconds:.3g} s or "
                f"{memory / 1e6:,.0f} MB for a short text"
            )
    remember("checked", total.hexdigest())


def files_of(folder: Path) -> list[Path]:
    """Returns the files in a model's folder from which its tokenizer and its template are read."""
    files = [*(folder / name for name in _FILES), *sorted(folder.glob(_MORE_TEMPLATES))]
    return [*filter(Path.is_file, files)]

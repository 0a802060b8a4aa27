"""Explains an error from Metal's watchdog to the user.

Importing this module does not import MLX.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from runners.errors import text_of

LONGEST = 2.0  # seconds that one evaluation on Metal should take at most
ADVICE = (
    "macOS ends GPU work that blocks the display: let the display sleep (or train over ssh), "
    "lower system.micro_batch_tokens, or set AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1, which makes "
    "the screen less smooth; then continue with --resume. See docs/memory.md"
)
_SIGNS = ("impacting interactivity", "gpu timeout", "gpu hang")
_WATCH = 'read -r done || printf "%s\\n" "$0" >&2'


def is_watchdog(error: BaseException) -> bool:
    """Returns whether this exception means that the system ended a command buffer because it took
    too long.
    """
    text = text_of(error).lower() if isinstance(error, RuntimeError) else ""
    return "command buffer" in text and any(sign in text for sign in _SIGNS)


@contextmanager
def explained_aborts(backend: str) -> Iterator[None]:
    """Prints ADVICE to stderr if, on Metal, the process exits inside the block without a message.

    MLX detects such an error on its own thread and ends the process there, so the error cannot be
    caught.
    """
    if backend != "metal":
        yield
        return
    advice = f"if a line above names a Metal command buffer: {ADVICE}"
    command = ["/bin/sh", "-c", _WATCH, advice]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as watcher:
        try:
            yield
        finally:
            watcher.communicate(b"done\n")

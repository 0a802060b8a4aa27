"""All text for people goes through here. A terminal shows control characters visibly; a pipe gets bytes.

Models, tokenizers, rewards and data sets contain untrusted text: on a terminal an escape sequence in it could
hide lines, change the window's title or answer for the user.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import termios
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import click

from runners.errors import UserError

# C0 but for line feed and tab, delete, C1; characters that change the direction of the text; halves of
# surrogate pairs.
_CODES = [
    *range(0x09),
    *range(0x0B, 0x20),
    *range(0x7F, 0xA0),
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
]
_TABLE = {code: chr(code).encode("unicode_escape").decode() for code in (*_CODES, *range(0xD800, 0xE000))}
_changed: dict[int, list[Any]] = {}  # a terminal's descriptor -> its settings before


def quiet_keys() -> None:
    """From now on the terminal of standard input shows no keys, and Ctrl-C discards no output.

    `restore_terminals` undoes it. Nothing changes where standard input is no terminal, and in the background,
    where the system would stop the process.
    """
    with suppress(OSError, ValueError, AttributeError, termios.error):  # standard input may be missing
        number = sys.stdin.fileno()
        if number in _changed or os.tcgetpgrp(number) != os.getpgrp():
            return
        _changed[number], quiet = termios.tcgetattr(number), termios.tcgetattr(number)
        quiet[3] &= ~termios.ECHO
        quiet[3] |= termios.NOFLSH  # Ctrl-C would discard what is not shown yet: half a block
        termios.tcsetattr(number, termios.TCSANOW, quiet)


def restore_terminals() -> None:
    """Restores every terminal's settings; also called by a process that is about to end at once."""
    for number, before in list(_changed.items()):
        with suppress(termios.error, OSError):
            termios.tcsetattr(number, termios.TCSANOW, before)
        _changed.pop(number, None)


class OutputLost(UserError):
    """Standard output cannot be written any more: no reader, a full disk, or it was closed."""

    def __init__(self, error: Exception):
        """`error`: the exception of the failed write."""
        self.is_pipe = isinstance(error, OSError) and error.errno == errno.EPIPE
        if self.is_pipe:
            self.exit_code = 141  # 128 + SIGPIPE, as shells count
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        super().__init__(f"standard output: {reason}")


def visible(text: str) -> str:
    r"""The text with every control character but line feed and tab spelt out, such as \x1b."""
    return text.translate(_TABLE)


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Rows of a table as lines; the columns with a number in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def echo(text: str = "", *, err: bool = False, nl: bool = True, raw: bool = False) -> None:
    """Writes to standard output, or to standard error, at once; onto a terminal as `visible` shows it.

    With `raw` a terminal gets the text as it is. Raises OutputLost if standard output fails. If standard
    error fails, nothing can be reported, and the work continues.
    """
    stream = sys.stderr if err else sys.stdout
    try:
        if not raw and stream is not None and stream.isatty():
            text = visible(text)
        # Without `color` click would remove escape sequences from text for a pipe.
        click.echo(_encodable(text, stream), file=stream, nl=nl, color=True)
    except (OSError, ValueError) as error:
        if not err:
            raise OutputLost(error) from error
        drop_output(stream)


def _encodable(text: str, stream: TextIO | None) -> str:
    """The text; characters that the stream's encoding does not have are escaped."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


class Output:
    """A stream that never raises: after a failed write, `fault` has the error and later text is dropped."""

    def __init__(self, stream: TextIO):
        """Writes to `stream`."""
        self._stream = stream
        self.fault: Exception | None = None

    def write(self, text: str) -> int:
        """Writes a text, unless a write has failed."""
        self._try(lambda: self._stream.write(_encodable(text, self._stream)))
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, unless a write has failed."""
        self._try(self._stream.flush)

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return not getattr(self._stream, "closed", False) and self._stream.isatty()

    def _try(self, action: Callable[[], object]) -> None:
        try:
            if self.fault is None:
                action()
        except (OSError, ValueError) as error:
            self.fault = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def drop_output(stream: TextIO | None) -> None:
    """Drops the text in a standard stream's buffers: Python would fail on it at exit."""
    with suppress(OSError, ValueError):
        if stream is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def open_closed_streams() -> None:
    """Opens closed standard input and error on /dev/null; raises OutputLost for a closed standard output.

    Otherwise the next opened file would get the stream's number, and receive everything that is printed.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (for as long as the process lives)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        raise OutputLost(ValueError("it is closed; redirect it to /dev/null to discard the output"))


@contextmanager
def others_visible() -> Iterator[None]:
    """Within the block, other packages' log records and warnings (they may quote files) are `visible` too."""
    make_record, format_warning = logging.getLogRecordFactory(), warnings.formatwarning

    def make(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = make_record(*arguments, **options)
        with suppress(Exception):  # a message that does not fit its arguments: logging reports it
            record.msg, record.args = visible(record.getMessage()), None
        return record

    try:
        if sys.stderr is not None and sys.stderr.isatty():
            logging.setLogRecordFactory(make)
            warnings.formatwarning = lambda *a, **k: visible(format_warning(*a, **k))  # pyright: ignore
        yield
    finally:
        logging.setLogRecordFactory(make_record)
        warnings.formatwarning = format_warning

"""Writes all output for users and escapes its control characters. Only replies may contain control
characters.

Models, tokenizers, rewards and data sets contain untrusted text. On a terminal, an escape sequence
in such text could hide lines, change the window's title or send input on behalf of the user. Log
files may later be shown on terminals.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import Any, TextIO

import click

from runners.errors import OBEYED, UserError, printable

# Also C0 except line feed and tab, and halves of surrogate pairs.
_CODES = (*range(9), *range(0x0B, 0x20), *OBEYED, *range(0xD800, 0xE000))
_TABLE = {code: chr(code).encode("unicode_escape").decode() for code in _CODES}


class OutputLost(UserError):
    """Raised when standard output can no longer be written, because it has no reader, the disk is
    full, or it was closed.
    """

    def __init__(self, error: Exception):
        """Creates the message from `error`, the exception that the failed write raised."""
        self.is_pipe = isinstance(error, BrokenPipeError)
        if self.is_pipe:
            self.exit_code = 141  # 128 + SIGPIPE, as shells count
        super().__init__(f"standard output: {getattr(error, 'strerror', None) or error}")


def visible(text: str) -> str:
    r"""Returns the text after escaping every control character except line feed and tab, for
    example as \x1b.
    """
    return text.translate(_TABLE)


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Formats a table's rows as lines. Columns whose number is in `right` are aligned to
    the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def echo(line: str = "", *, err: bool = False) -> None:
    """Writes one line to standard output or standard error immediately; see `printable`.

    Raises OutputLost if standard output fails. If standard error fails, the line is dropped.
    """
    _write(printable(line), err, nl=True)


def echo_text(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Writes a text of several lines like `echo`; see `visible`."""
    _write(visible(text), err, nl)


def echo_output(text: str, *, nl: bool = False) -> None:
    """Writes a command's result like `echo`. A pipe receives the result unchanged, and a terminal
    receives the result of `visible`.
    """
    shown = sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()
    _write(visible(text) if shown else text, False, nl)


def _write(text: str, err: bool, nl: bool) -> None:
    stream = sys.stderr if err else sys.stdout
    try:
        # Without `color`, click would remove escape sequences from text that is written to a pipe.
        click.echo(text, file=stream, nl=nl, color=True)
    except (OSError, ValueError) as error:
        if not err:
            raise OutputLost(error) from error
        drop_output(stream)


def escape_logs() -> None:
    """Converts every log record and warning from a library to one escaped line, because
    transformers quotes a model's files in such records.
    """
    if logging.getLogRecordFactory() is logging.LogRecord:
        logging.setLogRecordFactory(_EscapedRecord)
        usual = warnings.formatwarning
        warnings.formatwarning = lambda *found: f"{printable(usual(*found).rstrip())}\n"


class _EscapedRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return printable(super().getMessage())


class Output:
    """A stream whose writes never raise. After a failed write, `fault` contains the error, and
    later text is dropped.
    """

    def __init__(self, stream: TextIO):
        """Creates an output that writes to `stream`."""
        self._stream = stream
        self.fault: Exception | None = None

    def write(self, text: str) -> int:
        """Writes a text, unless an earlier write has failed."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, unless an earlier write has failed."""
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            if self.fault is None:
                action()
        except (OSError, ValueError) as error:
            self.fault = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def drop_output(stream: TextIO | None) -> None:
    """Drops the text in a standard stream's buffers, because writing that text at exit
    would fail.
    """
    with suppress(OSError, ValueError):
        if stream is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)

"""Defines errors that a user can act on. The command line prints each error to stderr in one
line.
"""

import errno
import itertools
import json
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

import attrs

# Messages of MLX's allocators (Metal, CUDA), of Metal's command buffers, of CUDA and of C++.
_OUT_OF_MEMORY = re.compile(
    r"(?i)\[malloc\] unable|\[(metal::malloc|malloc_or_wait)\]"
    r"|(insufficient|out of) memory|bad_alloc"
)
# The system's messages that errors of MLX, its compiler and Python's threads contain.
_OF_THE_SYSTEM = (
    *map(
        os.strerror,
        (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EROFS),
    ),
    "can't start new thread",
    "filesystem error",
)
# Environment variables with such names contain secrets.
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL|PROXY", re.IGNORECASE)
# Characters that JSON and TOML allow in a text, although terminals or editors act on them: delete,
# C1 control characters, line ends, and changes of the writing direction.
OBEYED = (
    *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A),
)  # fmt: skip
ESCAPED = {code: f"\\u{code:04x}" for code in OBEYED}
"""Their escapes in JSON and TOML, which parse to the same text."""
_LINE = 2000  # characters in a message
_LISTED = 40  # names in a list of what was found
_COMPARED = 1000  # names that a misspelt one is compared with
_QUOTED = 300  # characters of an exception's message that fit into a one-line message
_SHOWN = 80  # characters of a found value that fit into a one-line message


class UserError(Exception):
    """Something outside the program must be changed: data, a model folder, a reward, a full disk.

    The message is one line that names the faulty item, what was found and what is expected.
    """

    exit_code = 2


class ConfigError(UserError):
    """An invalid config.

    `problems` contains one line for each error, in the order of the file.
    """

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(printable(problem) for problem in problems)
        super().__init__("\n".join(self.problems))


class RewardError(UserError):
    """A reward failed, and reward.on_error or reward.stop_if_all_fail requires the run to end."""

    on_all_ranks = False  # whether all ranks of the run raise it at the same place


@attrs.frozen
class Failure:
    """A value that is returned instead of a reward, with the reason why there is no reward.

    The scorer counts this value as a failure of the reward function.
    """

    reason: str  # equal reasons are reported in one line
    found: str = ""  # the text of one completion in which it was found


class NumbersError(UserError):
    """Too many consecutive updates contained NaN or infinite values. The last good state has been
    saved.
    """

    exit_code = 3


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether this exception means that MLX or Python ran out of memory."""
    says_so = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(text_of(error))
    return isinstance(error, MemoryError) or bool(says_so)


def shortage(text: str) -> str:
    """Describes which resource ran out. `text` is the message of an exception that
    `is_out_of_memory` accepts.
    """
    if "Resource limit" in text:
        return f"too many arrays ({text}): Metal limits their number, whatever their size"
    return f"out of memory ({text})"


def system_fault(error: BaseException) -> str | None:
    """Returns the operating system's message about a refused file, thread or disk space, or None
    for other exceptions.
    """
    if isinstance(error, OSError):
        return error_line(error)
    lines = text_of(error).splitlines() if isinstance(error, RuntimeError) else []
    quoted = (line for line in lines if any(sign in line for sign in _OF_THE_SYSTEM))
    line = next(quoted, None)
    return None if line is None else line[-_QUOTED:]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name with the most similar spelling, or None if none is close."""
    few = itertools.islice(known, _COMPARED if len(name) <= _SHOWN else 0)
    lowered = {candidate.lower(): candidate for candidate in few if len(candidate) <= 2 * _SHOWN}
    matches = get_close_matches(name.lower(), lowered, n=1)
    return lowered[matches[0]] if matches else None


def listed(names: Sequence[str]) -> str:
    """Joins the names with commas, and shortens the list if it is long. An empty list gives
    "none".
    """
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more or "none"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean X?` for the nearest known name, or an empty string."""
    match = nearest(name, known)
    return f"; did you mean {match}?" if match else ""


def show(value: object) -> str:
    """Formats any object in TOML's syntax, shortened to fit into a one-line message."""
    text = spell(value[: _SHOWN + 1] if isinstance(value, str | list | tuple) else value, depth=3)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def spell(value: object, depth: int = 20) -> str:
    """Returns a value as inline TOML. Parts nested deeper than `depth` become an ellipsis."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple | dict) and depth == 0:
        return "..."
    if isinstance(value, list | tuple):
        return "[" + ", ".join(spell(item, depth - 1) for item in value) + "]"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{_key(k)} = {spell(item, depth - 1)}" for k, item in value.items())
            + "}"
        )
    if isinstance(value, int) and value.bit_length() > 4 * _SHOWN:
        # Python refuses to spell integers of more than 4,300 digits.
        return f"an integer of {value.bit_length()} bits"
    return text_of(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else spell(name)


def one_line(text: str, environ: Mapping[str, str]) -> str:
    """Returns a message for a terminal or a log: one printable line of limited length, without
    secrets from `environ`.

    Messages may quote untrusted text, and exceptions from third-party code may contain anything.
    """
    for name, value in environ.items():
        if len(value) >= 8 and _SECRET.search(name):
            text = text.replace(value, f"${name}")
    text = printable(text[: _LINE + 1])
    return text if len(text) <= _LINE else f"{text[:_LINE]}..."


def printable(line: str) -> str:
    """Escapes line breaks, terminal escapes and halves of surrogate pairs in `line`."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def text_of(value: object) -> str:
    """Returns the text of a third-party object or exception, or a replacement if its __str__
    fails.
    """
    try:
        return str(value)
    except (Exception, SystemExit) as fault:
        return f"a {type(value).__name__}, whose __str__ raises {type(fault).__name__}"


def first_line(error: BaseException) -> str:
    """Returns the first line of a third-party exception's message, or the exception's class if the
    message is empty.
    """
    return (text_of(error).splitlines() or [type(error).__name__])[0]


def first_lines(message: object) -> str:
    """Joins the first three lines of a third-party error, or of its message, into one."""
    lines = [line.strip() for line in text_of(message).splitlines() if line.strip()]
    return " ".join(lines[:3]) + (" ..." if len(lines) > 3 else "")


def error_line(error: BaseException, path: object = None) -> str:
    """Describes an exception in one line of limited length. The line starts with the line number in
    the file at `path` if the traceback contains that file.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"line {frame.lineno}: " for frame in frames if frame.filename == str(path)]
    text = one_line(" ".join(text_of(error).split()), os.environ)
    return f"{''.join(lines[-1:])}{type(error).__name__}: {text[:_QUOTED]}"


@contextmanager
def user_errors(
    what: str,
    *kinds: type[BaseException],
    why: Callable[[BaseException], str] = text_of,
) -> Iterator[None]:
    """Converts exceptions of these types inside the block to a UserError with `what` and the
    reason.
    """
    try:
        yield
    except kinds as error:
        raise UserError(f"{what}: {why(error)}") from error


def gigabytes(size: float) -> str:
    """Formats a number of bytes in decimal units: GB (0.31 GB, 12.4 GB), MB below 0.1 GB, and kB
    below 1 MB.
    """
    if size < 1e6:
        return f"{size / 1e3:.0f} kB"
    if size < 1e8:
        return f"{size / 1e6:.1f} MB" if size < 1e7 else f"{size / 1e6:.0f} MB"
    return f"{size / 1e9:.2f} GB" if size < 1e10 else f"{size / 1e9:.1f} GB"

"""A program on a terminal: a pseudo-terminal that keys can be typed into, and what its screen shows."""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios

# What of the environment rich heeds, and whatever runs the tests may have set.
RICH_READS = ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
CTRL_C = b"\x03"

_PIECE = re.compile(r"\x1b\[(?P<number>[?\d;]*)(?P<command>[A-Za-z])|(?P<letter>[^\x1b])", re.DOTALL)


class Screen:
    """The lines that a terminal shows, with those that scrolled away, without colours."""

    def __init__(self, output: str, columns: int):
        """After a program has written this: text, line ends, and the cursor movements that rich uses."""
        self.columns, self.cursor_shown = columns, True
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0
        for piece in _PIECE.finditer(output):
            if piece["letter"]:
                self._letter(piece["letter"])
            else:
                self._command(piece["command"], piece["number"])

    @property
    def lines(self) -> list[str]:
        """The text of each line, without the blanks at its end."""
        return ["".join(row).rstrip() for row in self._rows]

    def _letter(self, letter: str) -> None:
        if letter == "\r":
            self._column = 0
        elif letter == "\n":
            self._down()
        elif letter.isprintable():
            if self._column == self.columns:  # only the next letter wraps
                self._column = 0
                self._down()
            row = self._rows[self._row]
            row.extend(" " * (self._column + 1 - len(row)))
            row[self._column] = letter
            self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append([])

    def _command(self, command: str, number: str) -> None:
        if command == "A":
            self._row = max(self._row - int(number or 1), 0)
        elif command == "K":
            assert number == "2"  # the whole line
            self._rows[self._row] = []
        elif command in "hl" and number == "?25":
            self.cursor_shown = command == "h"
        else:
            assert command == "m", (number, command)  # a colour


class Session:
    """A program whose terminal is a new pseudo-terminal; a context manager that ends it."""

    def __init__(self, command: list[str], columns: int, **environment: str):
        """Starts `[sys.executable, …]` with these variables added to this process's."""
        self.columns, self.output = columns, ""
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        plain = {name: value for name, value in os.environ.items() if name not in RICH_READS}

        self.child = subprocess.Popen(
            command,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env={**plain, "TERM": "xterm-256color", **environment},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C becomes a signal
        )
        os.close(follower)

    def read_until(self, text: str = "") -> None:
        """Reads until this text appears after the last call, or, if left out, to the program's end."""
        start = len(self.output)
        while not text or text not in self.output[start:]:
            before = len(self.output)
            assert self.read(240), self.output[-2000:]
            if len(self.output) == before:
                assert not text, self.output[-2000:]
                return

    def read(self, seconds: float) -> bool:
        """Reads output within this time; False if there was none and nothing has ended."""
        if not select.select([self._leader], [], [], seconds)[0]:
            return False
        with contextlib.suppress(OSError):  # Linux's way of saying that the other side has closed
            self.output += os.read(self._leader, 65536).decode(errors="replace")
        return True

    def type(self, keys: bytes) -> None:
        """Presses keys."""
        os.write(self._leader, keys)

    def finish(self) -> tuple[int, Screen]:
        """The exit code, and the screen at the program's end."""
        self.read_until()
        return self.child.wait(), Screen(self.output, self.columns)

    def hang_up(self) -> int:
        """The exit code of the program once its terminal has gone away."""
        os.close(self._leader)
        self._leader = os.open(os.devnull, os.O_RDONLY)
        return self.child.wait(600)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *error: object) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._leader)

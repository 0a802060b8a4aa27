"""Runs an episode as a separate process with limits. The process can be ended in any state."""

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from runners.user_code.process import Outcome

LARGEST = 1 << 26  # limit on the bytes that a program may print
_TAIL = 1 << 16  # number of bytes kept from the end of the output
_GRACE = 1.0  # seconds to wait for the remaining output of a killed process
# The program reads the row from its standard input. A shell leads the process group and ends with
# the program. When the run ends for any reason, the shell's own input closes, and the group is
# killed.
_GUARD = """
exec 4<&0
"$@" <"$0" 4<&- & child=$!
{ read _; kill -KILL 0; } <&4 >/dev/null 2>&1 &
wait $child
"""


class AgentProcess:
    """A program that runs until it ends by itself or is ended."""

    def __init__(
        self, command: Sequence[str], row: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        """Starts the program. It can read `row`, the data's columns, from its standard input."""
        self._tail = b""
        self._printed = 0
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(row, default=str).encode())
            file.flush()
            self._process = subprocess.Popen(
                ["sh", "-c", _GUARD, f"/dev/fd/{file.fileno()}", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[file.fileno()],
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name="grpo-agent", daemon=True)
        self._reader.start()

    @property
    def has_ended(self) -> bool:
        """Whether the program has ended or has printed too much."""
        return self._printed > LARGEST or self._process.poll() is not None

    def end(self) -> Outcome:
        """Kills the program and all processes that it has started. The outcome's value is the last
        JSON object that the program printed.
        """
        status = self._process.poll()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(_GRACE)
        if self._process.stdin is not None:
            self._process.stdin.close()
        text = self._tail.decode("utf-8", "replace")
        if self._printed > LARGEST:
            return Outcome(fault=f"its program printed more than {LARGEST:,} bytes")
        if status != 0:
            last = text.strip().rpartition("\n")[2] or "it printed nothing"
            return Outcome(fault=f"its program ended with status {status}: {last[:200]}")
        return Outcome(last_object(text))

    def _read(self) -> None:
        output = self._process.stdout
        assert output is not None
        with output:
            while chunk := os.read(output.fileno(), _TAIL):
                self._printed += len(chunk)
                self._tail = (self._tail + chunk)[-_TAIL:]


def last_object(text: str) -> Mapping[str, Any] | None:
    """Returns the last line that is a JSON object, or None if there is none."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return None

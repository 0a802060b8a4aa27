"""A process that takes one step of a training whenever it is told to, and says what the step took.

Its program writes a line of JSON to stdout once it is ready. Then it reads a line from stdin for each step,
and answers with a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
_SECONDS_TO_END = 10  # what MLX has compiled for a GPU is kept at a process's end


class SteppingProcess:
    """`python -m MODULE ARGUMENTS… FILE`; the file holds the process's settings as JSON."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        settings: Mapping[str, Any],
        work: Path,
        environment: Mapping[str, str],
    ) -> None:
        """Start it, and wait until it is ready.

        Args:
            name: in messages.
            command: module and arguments.
            settings: of its file.
            work: folder for that file, and for what it writes to stderr.
            environment: all of it.

        Raises:
            UserError: it ended early; here as in `step`.
        """
        self.name = name
        self._log = tempfile.TemporaryFile("w+", dir=work)  # noqa: SIM115
        with tempfile.NamedTemporaryFile("w", suffix=".json", dir=work, delete=False) as file:
            json.dump(settings, file)
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command, file.name],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.ready = self._read()
        except BaseException:
            self.end()
            raise

    def step(self) -> dict[str, Any]:
        """Let one step happen; what it says of it."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise UserError(f"{self.name} ended early:\n{self._log.read()[-3000:]}")
        return json.loads(line)

    def end(self) -> None:
        """Tells the process that no further step comes, and ends it if it does not end by itself."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

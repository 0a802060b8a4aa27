"""The report that a run writes into its own folder when it ends, however it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from runners.config.sections import LogConfig
from runners.errors import UserError
from runners.report.page import REPORT, write_report


class _Folder(Protocol):
    """A run's folder that knows where it is."""

    def here(self) -> Path: ...


@contextmanager
def final_report(folder: _Folder, settings: LogConfig, note: Callable[[str], None]) -> Iterator[list[bool]]:
    """After the block, writes report.html where log.report asks for it.

    The block gets a list, and appends True once there is something to report; before that nothing is written.
    A report that cannot be written is a line, and costs the run nothing.
    """
    begun: list[bool] = []
    try:
        yield begun
    finally:
        if begun and settings.report:
            try:
                path = folder.here() / REPORT
                write_report([path.parent], path)
            except (UserError, OSError, MemoryError) as error:
                note(f"no report was written: {error}; `grpo report RUN` tries again")

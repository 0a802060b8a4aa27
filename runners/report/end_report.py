"""The report that a run writes into its folder at its end, also after an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runners.config.sections import LogConfig
from runners.errors import UserError
from runners.machine.signals import Stopped
from runners.report.page import REPORT, write_report


@contextmanager
def final_report(folder: Path, settings: LogConfig, note: Callable[[str], None]) -> Iterator[list[bool]]:
    """After the block, writes report.html if log.report asks for it.

    The block gets a list, and appends True when there is something to report; otherwise nothing is written.
    If the report cannot be written, a line says so; the run is not affected.
    """
    begun: list[bool] = []
    finished = False
    try:
        yield begun
        finished = True
    finally:
        if begun and settings.report:
            try:
                path = folder / REPORT
                write_report([path.parent], path)
            except (UserError, OSError, MemoryError) as error:
                note(f"no report was written: {error}; `grpo report RUN` tries again")
            except Stopped as stopped:
                if finished:
                    stopped.advice = f"the run is finished; its report: grpo report {folder}"
                raise

"""What the loop reports to: the methods of every display, and displays that show nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from runners.machine.signals import to_stderr


class Report:
    """Takes the loop's reports; this one shows nothing. A context manager that restores the terminal.

    A report that writes to standard output has `fault`: the exception of the first failed write, or None. No
    method raises it; from then on notes go to standard error.
    """

    def start(
        self,
        total_updates: int,
        header: Mapping[str, Any],
        *,
        done: int = 0,
        scores: Sequence[float] = (),
    ) -> None:
        """The run starts. `header` is name -> value and is shown once; its "run" is the title.

        For a resumed run, `done` is its current update, and `scores` are the evaluations before that.
        """

    def status(self, text: str) -> None:
        """The current activity, such as "evaluating"; a terminal shows it until the next step or status."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """An update is done. `metrics` has the log's names, none of which is required."""

    def eval(self, name: str, score: float, correct: int, total: int, seconds: float) -> None:
        """An evaluation is done: `score`, in 0..1, is the share of exact matches."""

    def example(self, record: Mapping[str, Any]) -> None:
        """A completion of the batch step, as in completions.jsonl; shown if a person asks for one."""

    def note(self, text: str) -> None:
        """A line worth reading: a notice, a checkpoint."""

    def alert(self, text: str) -> None:
        """A line that must be shown at once; another thread may call this."""

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A small table of text under a line."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run is over. `summary` is name -> value, shown once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


Silent = Report
"""Shows nothing at all: for a rank whose run is shown by another rank."""


class Quiet(Report):
    """Shows only the answer to a signal: for tests, and for use from other programs."""

    def alert(self, text: str) -> None:
        """See `Report.alert`."""
        to_stderr(text)

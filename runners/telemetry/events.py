"""Defines a run's events and their listeners: the log with its dashboards, and the display."""

from collections.abc import Iterable, Mapping
from typing import Any, Self

import attrs

from runners.machine.signals import to_stderr


@attrs.frozen
class Started:
    """The run starts or resumes."""

    updates: int  # number of updates in the whole run
    header: Mapping[str, Any]  # shown once; "run" is the title
    done: int = 0  # the current update of a resumed run
    score: float | None = None  # exact match in its last evaluation
    reward: float | None = None  # mean of its own rewards in its last evaluation


@attrs.frozen
class Status:
    """The current activity, such as "evaluating"; it ends with the next update or status."""

    text: str


@attrs.frozen
class Advanced:
    """The progress of the current activity, in tokens, prompts, or another unit `what`."""

    what: str
    done: int
    total: int


@attrs.frozen
class Updated:
    """An update is finished. `metrics` uses the log's names; all of them are optional."""

    metrics: Mapping[str, Any]
    logged: bool = False  # whether it is logged: every log.every-th update, and the last


@attrs.frozen
class Evaluated:
    """An evaluation is finished."""

    name: str
    score: float | None  # share of exact matches, 0 to 1; None: there are no reference answers
    correct: int
    total: int
    seconds: float
    metrics: Mapping[str, Any] = attrs.field(factory=dict)  # its line in the log
    problems: Iterable[Mapping[str, Any]] = ()  # its records for evaluations.jsonl
    reward: float | None = None  # the mean of the run's own rewards


@attrs.frozen
class Completions:
    """One batch step's completions, as records for completions.jsonl."""

    records: Iterable[Mapping[str, Any]]


@attrs.frozen
class Note:
    """A message for the user, such as a notice or a new checkpoint."""

    text: str


@attrs.frozen
class Alert:
    """A message that must be shown immediately. Another thread may send the message, and it is not
    recorded.
    """

    text: str


@attrs.frozen
class Finished:
    """The run has ended. `summary` maps names to values that are shown once."""

    summary: Mapping[str, Any]


Event = Started | Status | Advanced | Updated | Evaluated | Completions | Note | Alert | Finished


class Report:
    """A listener that shows nothing, for example on a rank whose run is shown by another rank. As a
    context manager, it restores the terminal.
    """

    @property
    def fault(self) -> Exception | None:
        """The first failed write to standard output, if any. After a failed write, notes are
        printed to standard error.
        """
        return None

    def handle(self, event: Event) -> None:
        """Handles one event. Raises nothing if standard output fails (see `fault`)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


class Quiet(Report):
    """A listener that shows only the response to a signal, for tests and for use in other
    programs.
    """

    def handle(self, event: Event) -> None:
        """See `Report.handle`."""
        if isinstance(event, Alert):
            to_stderr(event.text)

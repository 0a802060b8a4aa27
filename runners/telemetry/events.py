"""The events of a run, and what listens to them: the log with its dashboards, the display."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import attrs

from runners.machine.signals import to_stderr


@attrs.frozen
class Started:
    """The run starts, or goes on after a resume."""

    updates: int  # of the whole run
    header: Mapping[str, Any]  # shown once; "run" is the title
    done: int = 0  # the current update of a resumed run
    scores: Sequence[float] = ()  # its evaluations so far: exact match
    rewards: Sequence[float] = ()  # the same: the mean of its own rewards
    waiting: bool = False  # a part of the next update's rollouts, or all of them, is in the checkpoint


@attrs.frozen
class Status:
    """The current activity, such as "evaluating"; it ends with the next update or status."""

    text: str
    rest: float = 0.0  # how much of the same kind follows, as a multiple of what begins now
    expected: float = 0.0  # seconds that it takes, as far as one can say before it begins; 0: not known


@attrs.frozen
class Advanced:
    """How far the current activity has come: in tokens, prompts, or whatever `what` names."""

    what: str
    done: int
    total: int


@attrs.frozen
class Updated:
    """An update is done. `metrics` has the log's names, none of which is required."""

    metrics: Mapping[str, Any]
    logged: bool = False  # whether the log gets it: every log.every-th, and the last


@attrs.frozen
class Evaluated:
    """An evaluation is done."""

    name: str
    score: float | None  # share of exact matches, 0 to 1; None: there are no gold answers
    correct: int
    total: int
    seconds: float
    metrics: Mapping[str, Any] = attrs.field(factory=dict)  # its line in the log
    problems: Iterable[Mapping[str, Any]] = ()  # its records for evaluations.jsonl
    reward: float | None = None  # the mean of the run's own rewards


@attrs.frozen
class Completions:
    """The completions of a batch step: the records for completions.jsonl."""

    records: Iterable[Mapping[str, Any]]


@attrs.frozen
class Note:
    """A line worth reading: a notice, a checkpoint."""

    text: str


@attrs.frozen
class Alert:
    """A line that must be shown at once; another thread may send it. It is not recorded."""

    text: str


@attrs.frozen
class Remark:
    """A line for the log of events alone; `kind` is the event's name there."""

    kind: str
    text: str


@attrs.frozen
class Finished:
    """The run is over. `summary` is name -> value, shown once."""

    summary: Mapping[str, Any]


Event = Started | Status | Advanced | Updated | Evaluated | Completions | Note | Alert | Remark | Finished


class Report:
    """A listener; this one shows nothing. A context manager that restores the terminal."""

    @property
    def fault(self) -> Exception | None:
        """The first write to standard output that failed. From then on notes go to standard error."""
        return None

    def handle(self, event: Event) -> None:
        """Takes one event. Raises nothing if standard output fails: see `fault`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


Silent = Report
"""Shows nothing at all: for a rank whose run is shown by another rank."""


class Quiet(Report):
    """Shows only the answer to a signal: for tests, and for use from other programs."""

    def handle(self, event: Event) -> None:
        """See `Report.handle`."""
        if isinstance(event, Alert):
            to_stderr(event.text)

"""The display on a terminal: a block that is redrawn in place, with the run's lines scrolling above it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runners.errors import gigabytes
from runners.machine.terminal import Output, echo, visible
from runners.telemetry.events import Alert, Evaluated, Event, Finished, Note, Report, Started, Status, Updated
from runners.telemetry.progress import (
    Progress,
    as_text,
    count_text,
    duration_text,
    eval_line,
    is_finite,
    number_text,
)

MAX_WIDTH = 100  # columns; the rest of a wider terminal stays empty
MOST_REWARDS = 6  # in the block
# Columns that stay empty at the right: the terminal writes "^C" behind the block's last line. If that
# wrapped, the cursor would be one line too low, and a part of the block would never be erased.
_FREE = 2
_SMALL = {
    "length_penalty": "length penalty",  # a part of the reward above it
    "loss": "loss",
    "kl": "kl",
    "grad_norm": "grad norm",
    "completions/mean_length": "length",
    "entropy": "entropy",
}


class LiveReport(Report):
    """A `Report` for terminals, drawn with rich."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        console: Console | None = None,
        progress: Progress | None = None,
    ):
        """Draws on `stream`, or on a given `console`."""
        self._output = Output(stream or sys.stdout)
        self._console = console or Console(file=cast(TextIO, self._output), highlight=False)
        self._progress = progress or Progress()
        self._title, self._end = "grpo", ""  # `_end`: how the run has ended
        self._begun = self._finished = self._ended = False
        self._alerts = threading.Lock()  # no alert while the block is drawn for the last time
        # Two refreshes a second keep the time current and leave the cores to the run.
        self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=2)

    @property
    def fault(self) -> Exception | None:
        """See `Report`."""
        return self._output.fault

    def handle(self, event: Event) -> None:
        """See `Report.handle`. Before the run starts, only its status is shown."""
        self._progress.handle(event)
        match event:
            case Started(header=header):
                self._title = str(header.get("run", self._title))
                self._begun = True
                self._print(_facts({name: value for name, value in header.items() if name != "run"}))
                self._live.start(refresh=True)
            case Status():
                if not self._live.is_started and not self._finished:
                    self._live.start()
            case Evaluated():
                self._print(_text(eval_line(event), "cyan"))
            case Note(text):
                if self.fault:
                    echo(text, err=True)
                self._print(_text(text, "dim"))
            case Alert(text):  # above the block, which is redrawn below it
                with self._alerts:
                    if not self._ended:
                        self._print(Text(text, style="bold"))
            case Finished(summary):
                self._end = f"finished in {duration_text(self._progress.elapsed())}"
                self._stop()
                self._finished = True
                self._print(_facts(summary))
        if isinstance(event, Started | Status | Updated) and self._live.is_started:
            self._live.refresh()

    def __exit__(self, *error: object) -> None:
        if not self._finished:
            self._end = "stopped"
        self._stop()

    def _stop(self) -> None:
        with self._alerts:
            self._ended = True
        self._live.stop()  # draws the block for the last time

    def render(self) -> RenderableType:
        """The current block; rich calls this at every refresh."""
        if not self._begun:
            return _text(self._progress.activity() or self._end, "dim")
        activity = self._end or self._progress.activity()
        width = max(min(self._console.width - _FREE, MAX_WIDTH), 1)
        return Panel(
            Group(*_rows(self._progress, width - 4)),
            title=_text(self._title, "bold"),
            title_align="left",
            subtitle=_text(activity, "cyan") if activity else None,
            subtitle_align="left",
            border_style="dim",
            width=width,
            padding=(0, 1),
        )

    def _print(self, what: RenderableType) -> None:
        self._console.print(what, highlight=False)


def _text(text: str, style: str = "") -> Text:
    """A text of the run on one line, without escape sequences, which rich does not remove."""
    return Text(visible(text), style=style)


def _rows(progress: Progress, width: int) -> Iterator[RenderableType]:
    """The bar, the main numbers, and of the others those that an update has."""
    metrics, left = progress.metrics, progress.seconds_left()
    time = f"{duration_text(progress.elapsed())} so far" if left is None else f"{duration_text(left)} left"
    bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True, justify="right")
    done = ProgressBar(total=max(progress.total, 1), completed=progress.done, complete_style="green")
    bar.add_row(f"update {progress.done}/{progress.total}", done, time)
    yield from (bar, Text())
    grid = Table.grid(padding=(0, 2, 0, 0))
    for style in ("dim", "bold", "dim", "bold"):
        grid.add_column(style=style, no_wrap=True)
    reward = Text(f"{number_text(metrics.get('reward')):<12}", style="bold")
    label, now, first = progress.headline
    score = Text(now, style="bold")
    if first:
        score.append(f" from {first}", style="not bold dim")
    grid.add_row("reward", reward, label, score)
    rate = count_text(metrics.get("tokens_per_second"))
    grid.add_row("tokens/s", rate, "memory", gigabytes(progress.memory))
    yield grid
    yield _line({label: metrics[key] for key, label in _SMALL.items() if key in metrics}, width)
    rewards = {
        visible(key[8:-5]): value for key, value in metrics.items() if key[:8] + key[-5:] == "rewards//mean"
    }
    for name, value in list(rewards.items())[:MOST_REWARDS]:
        row = Text(f"{name}  ", style="dim", no_wrap=True, overflow="ellipsis")
        row.truncate(width - 8, overflow="ellipsis")
        yield row.append(number_text(value) if is_finite(value) else "none", style="not dim")
    if len(rewards) > MOST_REWARDS:
        yield Text(f"and {len(rewards) - MOST_REWARDS} more rewards", style="dim", no_wrap=True)


def _line(numbers: Mapping[str, Any], width: int) -> Text:
    """Labels and numbers on one line, as many as fit."""
    text = Text(style="dim", no_wrap=True)
    for label, value in numbers.items():
        part = Text("   " if text else "").append(f"{label} ")
        part.append(number_text(value), style="" if is_finite(value) else "bold red")
        if text.cell_len + part.cell_len <= width:
            text.append_text(part)
    return text


def _facts(rows: Mapping[str, Any]) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(_text(name), _text(as_text(value)))
    return grid

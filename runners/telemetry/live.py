"""The display on a terminal: a block that is redrawn in place, with the run's lines scrolling above it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any, TextIO, cast

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runners.errors import gigabytes
from runners.machine.terminal import Output, echo, quiet_keys, restore_terminals, visible
from runners.telemetry import events
from runners.telemetry.block_rows import detail_rows
from runners.telemetry.events import (
    Alert,
    Evaluated,
    Event,
    Finished,
    Note,
    Report,
    Started,
    Status,
    Updated,
)
from runners.telemetry.progress import (
    Progress,
    as_text,
    count_text,
    duration_text,
    eval_line,
    is_finite,
    number_text,
    percent_text,
    sparkline,
)

MAX_WIDTH = 100  # columns; the rest of a wider terminal stays empty
# Columns that stay empty at the right: the terminal writes "^C" behind the block's last line. If that
# wrapped, the cursor would be one line too low, and a part of the block would never be erased.
_FREE = 2
_SMALL = (
    ("length penalty", "length_penalty"),  # a part of the reward above it
    ("loss", "loss"),
    ("kl", "kl"),
    ("grad norm", "grad_norm"),
    ("length", "completions/mean_length"),
    ("entropy", "entropy"),
)


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
        output = Output(stream or sys.stdout)
        self._output = output
        self._console = console or Console(file=cast(TextIO, output), highlight=False)
        self._progress = progress or Progress()
        self._title = "grpo"
        self._end = ""  # how the run has ended
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
                quiet_keys()
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
            case events.Table():
                self._print(_table(event))
            case Finished(summary):
                self._end = f"finished in {duration_text(self._progress.elapsed())}"
                restore_terminals()
                self._redraw()
                self._stop()
                self._finished = True
                self._print(_facts(summary))
            case _:
                pass
        if isinstance(event, Started | Status | Updated):
            self._redraw()

    def __exit__(self, *error: object) -> None:
        if not self._finished:
            self._end = "stopped"
            restore_terminals()
        self._stop()

    def _stop(self) -> None:
        with self._alerts:
            self._ended = True
        self._live.stop()

    def render(self) -> RenderableType:
        """The current block; rich calls this at every refresh."""
        if not self._begun:
            return _text(self._progress.activity() or self._end, "dim")
        progress = self._progress
        width = max(min(self._console.width - _FREE, MAX_WIDTH), 1)
        rows = [_bar(progress), Text(), _numbers(progress, width), _small(progress, width - 4)]
        rows += detail_rows(progress, width - 4)
        title = _text(self._title, "bold")
        activity = self._end or progress.activity()
        status = _text(activity, "cyan") if activity else None
        return Panel(
            Group(*rows),
            title=title,
            title_align="left",
            subtitle=status,
            subtitle_align="left",
            border_style="dim",
            width=width,
            padding=(0, 1),
        )

    def _redraw(self) -> None:
        if self._live.is_started:
            self._live.refresh()

    def _print(self, what: RenderableType) -> None:
        self._console.print(what, highlight=False)


def _text(text: str, style: str = "") -> Text:
    """A text of the run without escape sequences, which rich does not remove."""
    return Text(visible(text), style=style)


def _bar(progress: Progress) -> RenderableType:
    row = Table.grid(expand=True, padding=(0, 2, 0, 0))
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=max(progress.total, 1), completed=progress.done, complete_style="green")
    left = progress.seconds_left()
    time_left = (
        f"{duration_text(left)} left" if left is not None else f"{duration_text(progress.elapsed())} so far"
    )
    row.add_row(Text(f"update {progress.done}/{progress.total}"), bar, Text(time_left))
    return row


def _numbers(progress: Progress, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for style in ("dim", "bold", "dim", "bold"):
        grid.add_column(style=style, no_wrap=True)
    reward = Text(f"{number_text(progress.metrics.get('reward')):<6}", style="bold")
    bars = max((width - 58) // 2, 6)
    reward.append(f" {sparkline(progress.rewards, bars):<{bars}}", style="not bold green")
    score = Text(percent_text(progress.exact_match), style="bold")
    if len(progress.scores) > 1 or (progress.scores and is_finite(progress.metrics.get("em"))):
        score.append(f" from {percent_text(progress.scores[0])}", style="not bold dim")
    grid.add_row("reward", reward, "exact match", score)
    grid.add_row("tokens/s", count_text(progress.tokens_per_second), "memory", gigabytes(progress.memory))
    return grid


def _small(progress: Progress, width: int) -> RenderableType:
    text = Text(style="dim", no_wrap=True)
    for label, key in _SMALL:
        if key not in progress.metrics:
            continue
        value = progress.metrics[key]
        part = Text("   " if text else "").append(f"{label} ")
        part.append(number_text(value), style="" if is_finite(value) else "bold red")
        if text.cell_len + part.cell_len <= width:
            text.append_text(part)
    return text


def _table(table: events.Table) -> RenderableType:
    grid = Table(box=SIMPLE, title=_text(table.title, "dim"), title_justify="left", header_style="dim")
    for place, column in enumerate(table.columns):
        at_edge = place in (0, len(table.columns) - 1)
        grid.add_column(_text(column), justify="left" if at_edge else "right")
    for row in table.rows:
        grid.add_row(*map(_text, row))
    return grid


def _facts(rows: Mapping[str, Any]) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(_text(name), _text(as_text(value)))
    return grid

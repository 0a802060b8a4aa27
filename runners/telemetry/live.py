"""Displays a run on a terminal: the run's lines, followed by a status line that is updated in
place.
"""

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from runners.errors import printable
from runners.telemetry.events import Advanced, Alert, Event, Finished, Started, Status, Updated
from runners.telemetry.report import LINE_WIDTH, PlainReport, duration_text

# Columns that stay empty at the right: the terminal writes "^C" behind the current line. If that
# wrapped, the cursor would be one line too low, and a part of the line would never be erased.
_FREE = 2


class LiveReport(PlainReport):
    """A `PlainReport` for terminals, whose last line is drawn with rich."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        console: Console | None = None,
        every: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Writes to `stream`, or to a given `console`; for other arguments, see `PlainReport`."""
        super().__init__(stream or sys.stdout, every=every, clock=clock)
        self._console = console or Console(file=cast(TextIO, self._stream), highlight=False)
        # Two refreshes a second keep the time current and leave the cores to the run.
        self._live = Live(
            console=self._console, get_renderable=self.render, refresh_per_second=2, transient=True
        )

    def handle(self, event: Event) -> None:
        """See `Report.handle`. Before the run starts, only its status is shown."""
        if isinstance(event, Alert):
            self._line(event.text)
        elif isinstance(event, Advanced):  # in the current line
            self._advanced = event
        else:
            super().handle(event)
        if isinstance(event, Started | Status | Updated):
            self._live.start()
            self._live.refresh()
        elif isinstance(event, Finished):
            self._live.stop()

    def __enter__(self) -> Self:
        return self  # rich keeps the current line

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def render(self) -> Text:
        """Returns the current line. rich calls this method at every refresh."""
        parts = [self.activity()]
        if self.total:
            left = self.seconds_left()
            so_far = f"{duration_text(self.elapsed())} so far"
            spent = so_far if left is None else f"{duration_text(left)} left"
            parts = [f"update {self.done}/{self.total}", spent, *parts]
        text = Text(printable("  ".join(filter(None, parts))), style="cyan", no_wrap=True)
        text.truncate(max(self._console.width - _FREE, 1), overflow="ellipsis")
        return text

    @property
    def _columns(self) -> int:
        return max(min(self._console.width - _FREE, LINE_WIDTH), 20)

    def _line(self, text: str) -> None:
        self._console.print(Text(printable(text)), soft_wrap=True)

"""The display on a terminal: the run's lines, and below them one line that is kept current."""

from __future__ import annotations

import sys
import threading
from typing import TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from runners.machine.terminal import visible
from runners.telemetry.events import Advanced, Alert, Event, Finished, Started, Status, Updated
from runners.telemetry.progress import Progress, duration_text
from runners.telemetry.report import LINE_WIDTH, PlainReport

# Columns that stay empty at the right: the terminal writes "^C" behind the current line. If that wrapped, the
# cursor would be one line too low, and a part of the line would never be erased.
_FREE = 2


class LiveReport(PlainReport):
    """A `PlainReport` for terminals, whose last line is drawn with rich."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        console: Console | None = None,
        progress: Progress | None = None,
    ):
        """Writes to `stream`, or to a given `console`."""
        super().__init__(stream or sys.stdout, progress=progress)
        self._console = console or Console(file=cast(TextIO, self._stream), highlight=False)
        self._begun = self._ended = False
        self._alerts = threading.Lock()  # no alert while the current line is erased for the last time
        # Two refreshes a second keep the time current and leave the cores to the run.
        self._live = Live(
            console=self._console, get_renderable=self.render, refresh_per_second=2, transient=True
        )

    def handle(self, event: Event) -> None:
        """See `Report.handle`. Before the run starts, only its status is shown."""
        if isinstance(event, Alert):
            with self._alerts:
                if not self._ended:
                    self._line(event.text)
            return
        if isinstance(event, Advanced):  # in the current line
            self._progress.handle(event)
            return
        super().handle(event)
        match event:
            case Started():
                self._begun = True
                self._live.start(refresh=True)
            case Status() if not self._live.is_started and not self._ended:
                self._live.start()
            case Finished():
                self._stop()
        if isinstance(event, Started | Status | Updated) and self._live.is_started:
            self._live.refresh()

    def __exit__(self, *error: object) -> None:
        self._stop()

    def _stop(self) -> None:
        with self._alerts:
            self._ended = True
        self._live.stop()

    def render(self) -> Text:
        """The current line; rich calls this at every refresh."""
        progress, parts = self._progress, []
        if self._begun:
            left = progress.seconds_left()
            time = duration_text(progress.elapsed() if left is None else left)
            parts = [
                f"update {progress.done}/{progress.total}",
                f"{time} {'so far' if left is None else 'left'}",
            ]
        words = "  ".join(filter(None, [*parts, progress.activity()]))
        text = Text(visible(words), style="cyan", no_wrap=True)
        text.truncate(max(self._console.width - _FREE, 1), overflow="ellipsis")
        return text

    @property
    def _columns(self) -> int:
        return max(min(self._console.width - _FREE, LINE_WIDTH), 20)

    def _line(self, text: str) -> None:
        self._console.print(Text(visible(text)), soft_wrap=True)

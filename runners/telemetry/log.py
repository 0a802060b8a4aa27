"""The logs of a run, files of JSON lines that docs/report.md describes, and dashboards if the config asks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from runners.config.sections import LogConfig
from runners.errors import UserError
from runners.files.json_files import plain_value
from runners.files.json_lines import JsonLines
from runners.files.run_files import COMPLETIONS, EVALUATIONS, EVENTS, METRICS
from runners.telemetry.dashboards import Target, open_dashboards
from runners.telemetry.events import Completions, Evaluated, Event, Updated


class MetricsLog:
    """The log files and dashboards of a run, as the config's [log] asks; a context manager.

    Raises UserError at construction if the package of a dashboard is not installed, or if a file cannot be
    opened.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: LogConfig,
        *,
        name: str = "grpo",
        config: Mapping[str, Any] | None = None,
        keep: Mapping[str, int] | None = None,
        update: int = 0,
    ):
        """Opens the files in `run_dir`; dashboards show the run's `name` and its resolved `config`.

        `keep` is what `positions` gave: the files continue from there, and dashboards from the run's
        `update`. Events are appended, including interruptions. None: all start over.
        """
        resumed_at = None if keep is None else update
        target = Target(run_dir, settings.run_name or name, settings, config or {}, resumed_at)
        self._dashboards = open_dashboards(target)
        texts = settings.completions
        wanted = {METRICS: settings.jsonl, EVENTS: settings.jsonl, COMPLETIONS: texts, EVALUATIONS: texts}
        self._files: dict[str, JsonLines] = {}
        for file in (file for file, asked in wanted.items() if asked):
            place = None if keep is None else sys.maxsize if file == EVENTS else keep.get(file, 0)
            try:
                self._files[file] = JsonLines(run_dir / file, keep=place)
            except OSError as error:
                raise UserError(f"{run_dir / file}: cannot be written: {error.strerror or error}") from error
        self.names = list(self._files)

    def handle(self, event: Event) -> None:
        """Writes what an event has for the files, and sends metrics to the dashboards."""
        match event:
            case Updated(metrics, logged=True):
                self.log(metrics)
            case Evaluated():
                self.log(event.metrics)
                self.write(EVALUATIONS, event.problems)
            case Completions(records):
                self.write(COMPLETIONS, records)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Writes one line of metrics. Dashboards get the finite numbers."""
        self.write(METRICS, [metrics])
        if self._dashboards:
            plain = {name: plain_value(value, name, []) for name, value in metrics.items()}
            numbers = {name: value for name, value in plain.items() if type(value) in (int, float)}
            for dashboard in self._dashboards:
                dashboard.log(numbers, int(plain.get("update") or 0))

    def write(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Appends records to one of the files, if the config asks for it; else they are not made."""
        if name in self._files:
            for record in records:
                self._files[name].write(record)

    def fault(self) -> str | None:
        """Why a line could not be written yet; None: all lines are written."""
        for lines in self._files.values():
            if lines.fault:
                return f"{lines.path}: cannot be written: {lines.fault.strerror or lines.fault}"
        return None

    def positions(self) -> dict[str, int]:
        """Bytes of each file that a resume cuts back. Raises UserError if a line is not written yet."""
        for lines in self._files.values():
            lines.push()
        if fault := self.fault():
            raise UserError(fault)
        return {name: lines.written for name, lines in self._files.items() if name != EVENTS}

    def close(self) -> None:
        """Closes the files and finishes the dashboards' runs."""
        for part in (*self._files.values(), *self._dashboards):
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.close()
        if kind is None and (fault := self.fault()):
            raise UserError(f"{fault}; its last lines are lost")

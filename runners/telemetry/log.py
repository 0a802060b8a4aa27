"""The logs of a run, files of JSON lines that docs/report.md describes, and dashboards if the config asks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runners.config.sections import LogConfig
from runners.errors import UserError
from runners.files.json_files import plain_value
from runners.files.json_lines import JsonLines
from runners.files.run_files import COMPLETIONS, EVALUATIONS, EVENTS, METRICS, TOKENS
from runners.telemetry.dashboards import CompletionTable, Target, open_sinks
from runners.telemetry.events import Completions, Evaluated, Event, Tokens, Updated


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
        `update`. Metrics that the file already had after that position are not sent twice. Events are
        appended, including interruptions. None: all start over.
        """
        target = Target(
            folder=run_dir,
            name=settings.run_name or name,
            project=settings.project,
            entity=settings.entity,
            config=dict(config or {}),
            resumed=keep is not None,
            from_update=update,
        )
        self._sinks, self._table_rows = open_sinks(target, settings), settings.table_rows
        # Updates that a resumed run repeats, and whether each is an evaluation: dashboards already have them.
        self._repeated: set[tuple[Any, bool]] = set()
        if self._sinks and keep is not None:
            self._repeated = _updates_behind(run_dir / METRICS, keep.get(METRICS, 0))
        texts = settings.completions
        wanted = {METRICS: settings.jsonl, EVENTS: settings.jsonl, COMPLETIONS: texts, EVALUATIONS: texts}
        wanted[TOKENS] = texts and settings.tokens != "none"
        self._files: dict[str, JsonLines] = {}
        for file in (file for file, asked in wanted.items() if asked):
            try:
                place = None if keep is None else sys.maxsize if file == EVENTS else keep.get(file, 0)
                self._files[file] = JsonLines(run_dir / file, keep=place)
            except OSError as error:
                raise UserError(f"{run_dir / file}: cannot be written: {error.strerror or error}") from error
        self.names = list(self._files)

    def handle(self, event: Event) -> None:
        """Writes what an event has for the files, and sends it to the dashboards."""
        match event:
            case Updated(metrics, logged=True):
                self.log(metrics)
            case Evaluated():
                self.log(event.metrics)
                self._write(EVALUATIONS, event.problems)
            case Completions(records):
                self.completions(records)
            case Tokens(record):
                self._write(TOKENS, [record])
            case _:
                pass

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Writes one line of metrics. Dashboards get the finite numbers, with "update" as the x axis."""
        self._write(METRICS, [metrics])
        if not self._sinks:
            return
        nonfinite: list[str] = []
        plain = {name: plain_value(value, name, nonfinite) for name, value in metrics.items()}
        numbers = {k: v for k, v in plain.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        update = int(plain.get("update") or 0)
        for sink in self._sinks:
            if sink.replaces or (update, _is_evaluation(plain)) not in self._repeated:
                sink.log(numbers, update)

    def completions(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes one line for each completion of a batch step; dashboards get a table of the first ones."""
        records = list(records)
        self._write(COMPLETIONS, records)
        if self._sinks and self._table_rows and records:
            batch, update = CompletionTable.of(records, self._table_rows), int(records[0]["update"])
            for sink in self._sinks:
                if sink.replaces or (update, False) not in self._repeated:
                    sink.completions(batch, update)

    def event(self, record: Mapping[str, Any]) -> None:
        """Writes one line of the run's diary."""
        self._write(EVENTS, [record])

    @property
    def wants_completions(self) -> bool:
        """Whether `completions` does anything: its records take time to make."""
        return COMPLETIONS in self._files or bool(self._sinks and self._table_rows)

    @property
    def keeps_tokens(self) -> bool:
        """Whether `tokens` writes anything: its records take time to make."""
        return TOKENS in self._files

    def _write(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
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
        for part in (*self._files.values(), *self._sinks):
            part.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.close()
        if kind is None and (fault := self.fault()):
            raise UserError(f"{fault}; its last lines are lost")


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    return "em" in line


def _updates_behind(path: Path, place: int) -> set[tuple[Any, bool]]:
    """The updates of a log's lines after the byte `place`, and whether each line is of an evaluation."""
    found: set[tuple[Any, bool]] = set()
    try:
        with open(path, "rb") as stream:
            stream.seek(place)
            lines = stream.read().split(b"\n")
    except OSError:
        return found  # no file: nothing was sent
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:  # the last line may be incomplete
            continue
        if isinstance(line, dict) and isinstance(line.get("update"), int):
            found.add((line["update"], _is_evaluation(line)))
    return found

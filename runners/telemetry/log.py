"""Writes a run's logs: JSON-lines files, described in docs/report.md, and the dashboards that [log]
configures.
"""

import json
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from runners.config.loading import Config
from runners.errors import UserError, first_line, user_errors
from runners.files.durable import disk_errors
from runners.files.json_files import JsonLines, plain_value, set_aside
from runners.files.run_files import COMPLETIONS, EVALUATIONS, EVENTS, METRICS
from runners.telemetry.events import Completions, Evaluated, Event, Updated

Dashboard = tuple[Callable[[Mapping[str, float], int], object], Callable[[], object]]
"""A dashboard that receives each update's metrics."""


def _tensorboard(folder: Path, config: Config, resumed_at: int | None) -> Dashboard:
    from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

    purge = None if resumed_at is None else resumed_at + 1  # later updates are replaced
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
    writer.add_text("config", f"    {json.dumps(config.to_dict())}")

    def log(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(folder: Path, config: Config, resumed_at: int | None) -> Dashboard:
    import wandb  # pyright: ignore[reportMissingImports]

    file = folder / "wandb_run_id"  # a resumed run continues with the same id
    run_id = secrets.token_hex(4)
    if resumed_at is not None and file.is_file():
        run_id = file.read_text(encoding="ascii", errors="replace").strip()
    file.write_text(f"{run_id}\n", encoding="ascii")
    run = wandb.init(
        project=config.log.project,
        entity=config.log.entity or None,
        name=config.log.run_name or config.run.name,
        id=run_id,
        resume=None if resumed_at is None else "allow",
        config=config.to_dict(),
        dir=str(folder),
    )
    # W&B ignores updates that a resumed run repeats.
    return lambda metrics, step: run.log(dict(metrics), step=step), run.finish


_DASHBOARDS = {"tensorboard": ("tensorboardX", _tensorboard), "wandb": ("wandb", _wandb)}


def check_dashboards_installed(config: Config) -> None:
    """Raises UserError if a dashboard that [log] uses is not installed."""
    for key, (package, _) in _DASHBOARDS.items():
        if getattr(config.log, key) and find_spec(package) is None:
            raise UserError(
                f"log.{key} = true requires the package {package}: `pip install {package}`"
            )


class MetricsLog:
    """A run's log files and dashboards, as configured in [log]; a context manager."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        *,
        keep: Mapping[str, int] | None = None,
        update: int = 0,
    ):
        """Opens the files in the run's `folder`. Raises UserError if a file or a dashboard cannot
        be opened.

        `keep` is a result from `positions`: the files continue from these positions, and dashboards
        continue from the run's `update`. If `keep` is None, all logs start over. Events are always
        appended, including interruptions.
        """
        resumed_at = None if keep is None else update
        self._dashboards: list[Dashboard] = []
        for key, (package, opened) in _DASHBOARDS.items():
            if getattr(config.log, key):
                what = f"log.{key} = true, but {package} cannot be started"
                with user_errors(what, Exception, why=first_line):  # such as no login or no network
                    self._dashboards.append(opened(folder, config, resumed_at))
        texts = config.log.completions
        wanted = {METRICS: config.log.jsonl, EVENTS: True, COMPLETIONS: texts, EVALUATIONS: texts}
        self._files: dict[str, JsonLines] = {}
        kept: Mapping[str, int] = {EVENTS: sys.maxsize, **(keep or {})}
        for file, asked in wanted.items():
            place = None if keep is None else kept.get(file, 0)
            with disk_errors(f"{folder / file}: cannot be written"):
                if asked:
                    self._files[file] = JsonLines(folder / file, keep=place)
                elif keep is None:
                    set_aside(folder / file)  # else an earlier run's would be read as this one's
        self.names = list(self._files)

    def handle(self, event: Event) -> None:
        """Writes an event's records to the files, and sends metrics to the dashboards."""
        match event:
            case Updated(metrics, logged=True):
                self.log(metrics)
            case Evaluated():
                self.log(event.metrics)
                self.write(EVALUATIONS, event.problems)
            case Completions(records):
                self.write(COMPLETIONS, records)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Writes one line of metrics. Dashboards receive the finite numbers."""
        self.write(METRICS, [metrics])
        if self._dashboards:
            plain = {name: plain_value(value, name, []) for name, value in metrics.items()}
            numbers = {name: value for name, value in plain.items() if type(value) in (int, float)}
            for log, _ in self._dashboards:
                log(numbers, int(plain.get("update") or 0))

    def write(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Appends records to one of the files if the config enables that file. Otherwise, the
        records are not computed.
        """
        if name in self._files:
            for record in records:
                self._files[name].write(record)

    def fault(self) -> str | None:
        """Returns the reason why a line could not be written yet, or None if all lines are
        written.
        """
        for lines in self._files.values():
            if lines.fault:
                return f"{lines.path}: cannot be written: {lines.fault.strerror or lines.fault}"
        return None

    def positions(self) -> dict[str, int]:
        """Returns the sizes in bytes to which a resumed run truncates the files. Raises UserError
        if a line is not written yet.
        """
        for lines in self._files.values():
            lines.push()
        fault = self.fault()
        if fault:
            raise UserError(fault)
        return {name: lines.written for name, lines in self._files.items() if name != EVENTS}

    def close(self) -> None:
        """Closes the files and finishes the dashboards' runs."""
        for lines in self._files.values():
            lines.close()
        for _, close in self._dashboards:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.close()
        fault = self.fault()
        if kind is None and fault:
            raise UserError(f"{fault}; its last lines are lost")

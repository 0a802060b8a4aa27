"""Dashboards that a run's metrics can go to: TensorBoard, Weights & Biases, Trackio."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np

from runners.config.sections import LogConfig
from runners.errors import UserError, first_line

_LONG = ("prompt", "completion")
_ID_FILE = "wandb_run_id"
_TEXT = 10_000  # characters of a text in a table


@attrs.frozen
class CompletionTable:
    """The part of a batch step's completions that dashboards get."""

    rows: list[dict[str, Any]]  # the first completions, for a table
    numbers: dict[str, list[float]]  # of all completions: reward, each function's reward, advantage, length

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], most: int) -> CompletionTable:
        """From records of completions.jsonl; `most` of them go into the table."""
        rewards = list(dict.fromkeys(name for record in records for name in record.get("rewards", {})))
        columns = {
            "reward": [record["reward"] for record in records],
            **{f"rewards/{name}": [record["rewards"].get(name) for record in records] for name in rewards},
            "advantage": [record["advantage"] for record in records],
            "tokens": [record["tokens"] for record in records],
        }
        columns = {name: list(map(_finite, values)) for name, values in columns.items()}
        rows = [
            {
                "update": record["update"],
                **{name: _text(record[name]) for name in ("prompt", "completion", "answer")},
                **{name: values[row] for name, values in columns.items()},
                "finished": record["finished"],
            }
            for row, record in enumerate(records[:most])
        ]
        return cls(rows, {name: [v for v in values if v is not None] for name, values in columns.items()})

    def columns(self) -> dict[str, Any]:
        """The table as W&B and Trackio take it."""
        return {"columns": list(self.rows[0]), "data": [list(row.values()) for row in self.rows]}


class Sink(Protocol):
    """Another place that gets the metrics.

    `replaces`: if a resumed run repeats updates, their new values replace the old ones. Otherwise they would
    appear twice, so they are not sent again.
    """

    replaces: bool

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def completions(self, batch: CompletionTable, step: int) -> None: ...

    def close(self) -> None: ...


def check_dashboards_installed(settings: LogConfig) -> None:
    """Raises UserError if a dashboard that [log] asks for is not installed."""
    missing = [_missing(key, kind.package) for key, kind in _DASHBOARDS.items() if getattr(settings, key)]
    problems = [problem for problem in missing if problem]
    if problems:
        raise UserError("; ".join(problems))


def open_sinks(target: Target, settings: LogConfig) -> list[Sink]:
    """The dashboards that [log] asks for. Raises UserError for one that is missing or does not start."""
    check_dashboards_installed(settings)
    sinks: list[Sink] = []
    for key, kind in _DASHBOARDS.items():
        if getattr(settings, key):
            try:
                sinks.append(kind(target))
            except Exception as error:  # each package has its own errors: no login, no network, no disk
                raise UserError(
                    f"log.{key} = true, but {kind.package} does not start: {first_line(error)}"
                ) from error
    return sinks


@attrs.frozen
class Target:
    """The run that a dashboard shows: its folder, name and position."""

    folder: Path  # the run's
    name: str
    project: str
    entity: str
    config: dict[str, Any]
    resumed: bool  # the run was resumed
    from_update: int = 0  # where a resumed run starts; it repeats later updates


class _TensorBoard:
    package, replaces = "tensorboardX", True

    def __init__(self, target: Target):
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        purge = target.from_update + 1 if target.resumed else None
        self._writer = SummaryWriter(str(target.folder / "tensorboard"), purge_step=purge)
        self._writer.add_text("config", f"    {json.dumps(target.config)}")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def completions(self, batch: CompletionTable, step: int) -> None:
        for number, row in enumerate(batch.rows):
            facts = ", ".join(f"{name} {value}" for name, value in row.items() if name not in _LONG)
            text = "\n\n".join([f"`{facts}`", *(f"**{name}**\n\n{_quoted(row[name])}" for name in _LONG)])
            self._writer.add_text(f"completions/{number}", text, step)
        for name, values in batch.numbers.items():
            if values:
                self._writer.add_histogram(f"histograms/{name}", np.array(values), step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    package, replaces = "wandb", False

    def __init__(self, target: Target):
        import wandb  # pyright: ignore[reportMissingImports]

        self._wandb = wandb
        self._run = wandb.init(
            project=target.project,
            entity=target.entity or None,
            name=target.name,
            id=_run_id(target),
            resume="allow" if target.resumed else None,
            config=target.config,
            dir=str(target.folder),
        )
        # Not W&B's own step, which can only increase: a resumed run repeats some updates.
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "update": step})

    def completions(self, batch: CompletionTable, step: int) -> None:
        if batch.rows:
            self._run.log({"completions": self._wandb.Table(**batch.columns()), "update": step})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    package, replaces = "trackio", False

    def __init__(self, target: Target):
        import trackio  # pyright: ignore[reportMissingImports]

        self._trackio = trackio
        # Trackio identifies a run by its name.
        resume = "allow" if target.resumed else "never"
        trackio.init(project=target.project, name=target.name, config=target.config, resume=resume)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(metrics), step=step)

    def completions(self, batch: CompletionTable, step: int) -> None:
        if batch.rows:
            self._trackio.log({"completions": self._trackio.Table(**batch.columns())}, step=step)

    def close(self) -> None:
        self._trackio.finish()


_DASHBOARDS = {"tensorboard": _TensorBoard, "wandb": _WandB, "trackio": _Trackio}


def _run_id(target: Target) -> str:
    """W&B's id of the run, kept in the run's folder so that a resume finds it; a new run gets a new one."""
    file = target.folder / _ID_FILE
    if target.resumed and file.is_file():
        return file.read_text(encoding="ascii", errors="replace").strip()
    run_id = secrets.token_hex(4)
    file.write_text(f"{run_id}\n", encoding="ascii")
    return run_id


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    text = text if len(text) <= _TEXT else f"{text[:_TEXT]}..."
    return text.encode("utf-8", "backslashreplace").decode()  # halves of surrogate pairs


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _quoted(text: str) -> str:
    """The text indented, so that Markdown shows it unchanged."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


def _missing(key: str, package: str) -> str | None:
    from importlib.util import find_spec

    if find_spec(package) is not None:
        return None
    return f"log.{key} = true needs the package {package}: `pip install {package}`"

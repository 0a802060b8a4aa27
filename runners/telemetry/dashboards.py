"""Dashboards that get a run's metrics: TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from runners.config.sections import LogConfig
from runners.errors import UserError, first_line

_ID_FILE = "wandb_run_id"


@attrs.frozen
class Dashboard:
    """Another place that gets the metrics."""

    log: Callable[[Mapping[str, float], int], object]  # metrics and the update
    close: Callable[[], object]


@attrs.frozen
class Target:
    """The run that a dashboard shows."""

    folder: Path  # the run's
    name: str
    settings: LogConfig
    config: Mapping[str, Any]
    resumed_at: int | None = None  # the update from which a resumed run goes on; it repeats later ones


def _tensorboard(target: Target) -> Dashboard:
    from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

    purge = None if target.resumed_at is None else target.resumed_at + 1  # later updates are replaced
    writer = SummaryWriter(str(target.folder / "tensorboard"), purge_step=purge)
    writer.add_text("config", f"    {json.dumps(target.config)}")

    def log(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return Dashboard(log, writer.close)


def _wandb(target: Target) -> Dashboard:
    import wandb  # pyright: ignore[reportMissingImports]

    run = wandb.init(
        project=target.settings.project,
        entity=target.settings.entity or None,
        name=target.name,
        id=_run_id(target),
        resume=None if target.resumed_at is None else "allow",
        config=dict(target.config),
        dir=str(target.folder),
    )
    # W&B ignores updates that a resumed run repeats.
    return Dashboard(lambda metrics, step: run.log(dict(metrics), step=step), run.finish)


_DASHBOARDS = {"tensorboard": ("tensorboardX", _tensorboard), "wandb": ("wandb", _wandb)}


def check_dashboards_installed(settings: LogConfig) -> None:
    """Raises UserError if a dashboard that [log] asks for is not installed."""
    for key, (package, _) in _DASHBOARDS.items():
        if getattr(settings, key) and find_spec(package) is None:
            raise UserError(f"log.{key} = true needs the package {package}: `pip install {package}`")


def open_dashboards(target: Target) -> list[Dashboard]:
    """The dashboards that [log] asks for. Raises UserError for one that is missing or does not start."""
    check_dashboards_installed(target.settings)
    found: list[Dashboard] = []
    for key, (package, opened) in _DASHBOARDS.items():
        try:
            found += [opened(target)] if getattr(target.settings, key) else []
        except Exception as error:  # each package has its own errors: no login, no network, no disk
            raise UserError(f"log.{key} = true, but {package} does not start: {first_line(error)}") from error
    return found


def _run_id(target: Target) -> str:
    """W&B's id of the run, kept in the run's folder so that a resume finds it; a new run gets a new one."""
    file = target.folder / _ID_FILE
    if target.resumed_at is not None and file.is_file():
        return file.read_text(encoding="ascii", errors="replace").strip()
    run_id = secrets.token_hex(4)
    file.write_text(f"{run_id}\n", encoding="ascii")
    return run_id

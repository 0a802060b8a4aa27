"""Dashboards that a run's metrics can go to: TensorBoard, Weights & Biases, Trackio."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from runners.config.sections import LogConfig
from runners.errors import UserError, first_line


class Sink(Protocol):
    """Somewhere else that the metrics go."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def check_installed(settings: LogConfig) -> None:
    """Raises UserError where a dashboard that [log] asks for is not installed."""
    missing = [_missing(key, kind.package) for key, kind in _DASHBOARDS.items() if getattr(settings, key)]
    problems = [problem for problem in missing if problem]
    if problems:
        raise UserError("; ".join(problems))


def open_sinks(run_dir: Path, settings: LogConfig, name: str, config: dict[str, Any]) -> list[Sink]:
    """The dashboards that [log] asks for. Raises UserError for one that is missing or does not start."""
    check_installed(settings)
    sinks: list[Sink] = []
    for key, kind in _DASHBOARDS.items():
        if getattr(settings, key):
            try:
                sinks.append(kind(run_dir, name, config))
            except Exception as error:  # each package has errors of its own: no login, no network, no disk
                raise UserError(
                    f"log.{key} = true, but {kind.package} does not start: {first_line(error)}"
                ) from error
    return sinks


class _TensorBoard:
    package = "tensorboardX"

    def __init__(self, run_dir: Path, name: str, config: dict[str, Any]):
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))
        self._writer.add_text("config", f"    {json.dumps(config)}")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    package = "wandb"

    def __init__(self, run_dir: Path, name: str, config: dict[str, Any]):
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(project="grpo_fn", name=name, config=config, dir=str(run_dir))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    package = "trackio"

    def __init__(self, run_dir: Path, name: str, config: dict[str, Any]):
        import trackio  # pyright: ignore[reportMissingImports]

        self._trackio = trackio
        trackio.init(project="grpo_fn", name=name, config=config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


_DASHBOARDS = {"tensorboard": _TensorBoard, "wandb": _WandB, "trackio": _Trackio}


def _missing(key: str, package: str) -> str | None:
    from importlib.util import find_spec

    if find_spec(package) is not None:
        return None
    return f"log.{key} = true needs the package {package}: `pip install {package}`"

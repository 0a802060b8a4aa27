"""The logs of a run: `training_log.jsonl`, `completions.jsonl`, and dashboards if the config asks."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from runners.errors import UserError, first_line
from runners.sections import LogConfig

_BLOCK = 1 << 16  # bytes read at a time
# Characters that end a line for str.splitlines, and so for some readers of JSON lines.
_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class Sink(Protocol):
    """Somewhere else that the metrics go."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def to_json(record: Mapping[str, Any]) -> tuple[str, list[str]]:
    """One JSON object on one line, and the names of its numbers that are not finite.

    Such numbers become null and are named in an extra key "nonfinite" (dotted where they are nested), as JSON
    has no NaN. 0-d arrays become numbers. Raises TypeError, with the name, for what JSON cannot hold.
    """
    nonfinite: list[str] = []
    plain = {str(key): _plain(value, str(key), nonfinite) for key, value in record.items()}
    if nonfinite:
        plain["nonfinite"] = nonfinite
    return json.dumps(plain, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS), nonfinite


class JsonLines:
    """A file of one JSON object a line, each of them written out at once.

    A line that the disk does not take is kept, and written before the next one: none is lost or cut in two
    for as long as the process lives. `fault` is why there is such a line, or None.
    """

    def __init__(self, path: Path, *, keep: int | None = None):
        """Opens `path`; OSError where that is refused.

        Args:
            path: the file; its folder is made.
            keep: None keeps an older file as `NAME.previous.jsonl`. A number continues it: after so many
                bytes, or after its last whole line where it is shorter.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if keep is not None:
            _cut(path, keep)
        elif path.exists() and path.stat().st_size:
            os.replace(path, path.with_suffix(".previous.jsonl"))
        self.path = path
        self.fault: OSError | None = None
        self._waiting = b""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.written = os.fstat(self._file).st_size  # bytes, of whole lines where nothing waits

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record (see `to_json`)."""
        line, _ = to_json(record)
        # A lone surrogate in a completion turns into its JSON escape instead of an error.
        self._waiting += line.encode("utf-8", "backslashreplace") + b"\n"
        self.push()

    def push(self) -> None:
        """Writes what waits, as far as the disk takes it."""
        try:
            while self._waiting:
                count = os.write(self._file, self._waiting)
                self.written += count
                self._waiting = self._waiting[count:]
        except OSError as error:
            self.fault = error
        else:
            self.fault = None

    def close(self) -> None:
        """Closes the file; nothing can be written afterwards."""
        self.push()
        os.close(self._file)


class MetricsLog:
    """What a run writes about itself, as the config's [log] asks; a context manager.

    Raises UserError at construction where a dashboard is asked for whose package is not installed, or where a
    file cannot be opened.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: LogConfig,
        *,
        name: str = "grpo",
        config: Mapping[str, Any] | None = None,
        keep: Mapping[str, int] | None = None,
    ):
        """Opens the files in `run_dir`; dashboards show the run's `name` and its resolved `config`.

        `keep` has what `positions` gave: the files are continued from there. None: they begin anew.
        """
        self._sinks = open_sinks(run_dir, settings, name, dict(config or {}))
        wanted = {"training_log.jsonl": settings.jsonl, "completions.jsonl": settings.completions}
        self._files: dict[str, JsonLines] = {}
        for file in (file for file, asked in wanted.items() if asked):
            try:
                place = None if keep is None else keep.get(file, 0)
                self._files[file] = JsonLines(run_dir / file, keep=place)
            except OSError as error:
                raise UserError(f"{run_dir / file}: cannot be written: {error.strerror or error}") from error
        self.paths = [lines.path for lines in self._files.values()]

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Writes one line of metrics. Dashboards get the finite numbers, with "update" as their x axis."""
        if "training_log.jsonl" in self._files:
            self._files["training_log.jsonl"].write(metrics)
        if not self._sinks:
            return
        nonfinite: list[str] = []
        plain = {name: _plain(value, name, nonfinite) for name, value in metrics.items()}
        numbers = {k: v for k, v in plain.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        for sink in self._sinks:
            sink.log(numbers, int(plain.get("update") or 0))

    def completions(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes one line for each completion."""
        if "completions.jsonl" in self._files:
            for record in records:
                self._files["completions.jsonl"].write(record)

    def fault(self) -> str | None:
        """Why a line could not be written yet; None: all of them are."""
        for lines in self._files.values():
            if lines.fault:
                return f"{lines.path}: cannot be written: {lines.fault.strerror or lines.fault}"
        return None

    def positions(self) -> dict[str, int]:
        """Bytes of each file so far; UserError where a line still waits for the disk."""
        for lines in self._files.values():
            lines.push()
        if fault := self.fault():
            raise UserError(fault)
        return {name: lines.written for name, lines in self._files.items()}

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


def open_sinks(run_dir: Path, settings: LogConfig, name: str, config: dict[str, Any]) -> list[Sink]:
    """The dashboards that [log] asks for. Raises UserError for one that is missing or does not start."""
    wanted = {"tensorboard": _TensorBoard, "wandb": _WandB, "trackio": _Trackio}
    missing = [_missing(key, kind.package) for key, kind in wanted.items() if getattr(settings, key)]
    problems = [problem for problem in missing if problem]
    if problems:
        raise UserError("; ".join(problems))
    sinks: list[Sink] = []
    for key, kind in wanted.items():
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


def _missing(key: str, package: str) -> str | None:
    from importlib.util import find_spec

    if find_spec(package) is not None:
        return None
    return f"log.{key} = true needs the package {package}: `pip install {package}`"


def _plain(value: Any, name: str, nonfinite: list[str]) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        nonfinite.append(name)
        return None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(part, f"{name}.{key}", nonfinite) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, f"{name}.{i}", nonfinite) for i, part in enumerate(value)]
    raise TypeError(f"{name}: a {type(value).__name__} cannot be written as JSON")


def _cut(path: Path, most: int) -> None:
    """Leaves the whole lines within the first `most` bytes of a file, if there is one."""
    if not path.exists():
        return
    with open(path, "r+b") as stream:
        stream.seek(0, os.SEEK_END)
        end = min(most, stream.tell())
        while end:  # backwards to the end of a line
            start = max(end - _BLOCK, 0)
            stream.seek(start)
            whole = stream.read(end - start).rfind(b"\n") + 1
            end = start + whole
            if whole:
                break
        stream.truncate(end)
        os.fsync(stream.fileno())

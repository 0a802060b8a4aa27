"""Saving while the run goes on: one checkpoint at a time, written in a separate thread.

The arrays of a state never change, so a checkpoint needs no copy of them. They stay in memory until it is
written, usually while the next rollout is sampled. An update makes new arrays; it waits for the checkpoint if
memory cannot hold both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from grpo_fn.backends import enabled
from runners.checkpoints.snapshot import Snapshot, prune_checkpoints, write_checkpoint
from runners.config.sections import CheckpointConfig
from runners.errors import UserError
from runners.files.durable import disk_errors, flush

if TYPE_CHECKING:
    from runners.models.loaded_model import LoadedModel

SavePoint = tuple[int, int]  # batch step, update


class _Job(NamedTuple):
    place: SavePoint
    why: str  # the start of the line that reports it
    nbytes: int
    future: Future[Path]


class Saver:
    """Writes a run's checkpoints; a context manager that waits for the last of them."""

    def __init__(
        self,
        folder: Path,
        settings: CheckpointConfig,
        logs: Sequence[str],
        note: Callable[[str], None],
        *,
        writes: bool = True,
    ) -> None:
        """Saves into `folder`. The files `logs` in it are flushed to the disk with each checkpoint.

        `note` takes lines. Without `writes` nothing is saved: rank 0 saves for the others.
        """
        self._folder, self._settings, self._logs, self._note = folder, settings, logs, note
        self._writes = writes
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._job: _Job | None = None
        self.done: SavePoint | None = None  # the last saved one
        self._stopped = 0.0

    def save(
        self, take: Callable[[], Snapshot], place: SavePoint, why: str = "", *, strict: bool = False
    ) -> None:
        """Starts to write the snapshot of `take`; with `strict` also waits for it, and raises if it fails."""
        if not self._writes:
            return
        self.wait()
        started = time.perf_counter()
        try:
            snapshot = take()
        except UserError as error:
            self.failed(error, strict)
        else:
            self._job = _Job(place, why, snapshot.nbytes, self._pool.submit(self._write, snapshot))
            del snapshot  # so that its arrays are freed when they are written
        self._stopped += time.perf_counter() - started
        if strict or not enabled("background_saving"):
            self.wait(strict=strict)

    def poll(self) -> None:
        """Reports the result of a checkpoint, if it is known."""
        if self._job and self._job.future.done():
            self.wait()

    def wait_for_memory(self, free: Callable[[], int]) -> None:
        """Before new weights are made: waits if twice the arrays being written exceed `free` bytes."""
        if self._job and 2 * self._job.nbytes > free():
            self.wait()

    def wait(self, *, strict: bool = False) -> None:
        """Waits until nothing is being written, and reports the result.

        Raises UserError if it failed and `strict` or checkpoint.on_error = "stop" asks for that.
        """
        if self._job is None:
            return
        job, started = self._job, time.perf_counter()
        try:
            path = job.future.result()  # a signal may interrupt it: then the job is waited for again
            self._job, self.done = None, job.place
            self._note(f"{job.why}saved {path}")
        except UserError as error:
            self._job = None
            self.failed(error, strict)
        finally:
            self._stopped += time.perf_counter() - started

    def failed(self, error: UserError, strict: bool = False) -> None:
        """Reports the error and continues, or raises it, as checkpoint.on_error says."""
        if strict or self._settings.on_error == "stop":
            raise error
        self._note(f"{error}; the run goes on (checkpoint.on_error)")

    def stopped_seconds(self) -> float:
        """Seconds that training waited for saving since the last call."""
        seconds, self._stopped = self._stopped, 0.0
        return seconds

    def _write(self, snapshot: Snapshot) -> Path:
        with disk_errors(f"{self._folder}: checkpoint-{snapshot.step} cannot be saved"):
            for log in self._logs:
                flush(self._folder / log)
            path = write_checkpoint(self._folder, snapshot)
            self._prune()
        return path

    def _prune(self) -> None:
        keep = self._settings
        prune_checkpoints(self._folder, keep_last=keep.keep_last, keep_best=keep.keep_best)

    def __enter__(self) -> Saver:
        try:  # a run that was killed before it pruned may have nothing left to save
            self._prune()
        except OSError as error:
            self.failed(UserError(f"{self._folder}: old checkpoints cannot be removed: {error}"))
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            self.wait(strict=kind is None and self._settings.on_error == "stop")
        finally:
            self._pool.shutdown()


def final_size(loaded: LoadedModel) -> int:
    """About the bytes of the final model: every parameter, unpacked, in the dtype of the source's files."""
    return loaded.num_parameters * loaded.source_dtype.size

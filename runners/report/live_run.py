"""A run's data for the page: read as its files grow, in pieces that a page can request one by one."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from runners.files.json_lines import LineFile
from runners.files.run_files import COMPLETIONS, EVALUATIONS, EVENTS, METRICS
from runners.report.completion_rows import ROWS, Part, PartMaker, evaluation_piece, read_evaluations
from runners.report.page_json import packed
from runners.report.run_record import RunRecord

_UPDATE = re.compile(rb'\{"batch_step": (\d{1,18}), "update": (\d{1,18})')
Place = Callable[[str, Callable[[], bytes]], Any]
"""Says where a page finds a piece, from its path and a function that makes it."""


class LiveRun:
    """The data of a run. Several threads may use it at the same time."""

    def __init__(self, folder: Path, most_bytes: int | None = None) -> None:
        """Reads nothing yet. UserError if the folder holds no run.

        If completions.jsonl has more than `most_bytes`, only those of evenly spread updates are used.
        """
        self.record = RunRecord(folder)
        self._guard = threading.Lock()
        self._files = {name: LineFile(folder / name) for name in (COMPLETIONS, EVALUATIONS)}
        self._maker, self._parts = PartMaker(), list[Part]()
        self._tail: tuple[int, Part] | None = None  # the part that still grows, and its number of rows
        self._evaluations: dict[int, list[Any]] = {}
        path = folder / COMPLETIONS
        size = os.path.getsize(path) if most_bytes and os.path.isfile(path) else 0
        self._stride = max(-(-size // (most_bytes or 1)), 1)  # of the updates whose completions are used
        self._left_out: set[int] = set()  # the other updates

    def summary(self) -> tuple[str, str, list[float | None]]:
        """The run's name, its state, and its last exact match, reward and update, and the last
        reward of an evaluation."""
        with self._guard:
            self.record.refresh()
            last = [self.record.last(name) for name in ("em", "reward", "update", "eval/reward")]
            return self.record.name, self.record.state(), last

    def signature(self) -> str:
        """A text that changes when a file has changed or the run has ended."""
        names = (METRICS, EVENTS, COMPLETIONS, EVALUATIONS)
        return f"{[_seen(self.record.folder / name) for name in names]}{self.record.state()}"

    def data(self, generation: int, since: int) -> bytes:
        """The run's data for the live page, compressed: the metrics from line `since` on if the reader's
        `generation` is still that of the files, else all of them."""
        with self._guard:
            seen = self.signature()
            self._refresh()
            since = since if generation == self._generation() else 0
            return packed({"seen": seen, **self._content(since, lambda path, _: path)})

    def content(self, place: Place) -> dict[str, Any]:
        """The run's data for a page, with all pieces where `place` puts them."""
        self._refresh()
        return self._content(0, place)

    def part(self, number: int, piece: str) -> bytes | None:
        """A piece of a part: "numbers" or "texts". None if there is none."""
        with self._guard:
            known = 0 <= number < len(self._parts) + bool(self._maker.waiting)
            return self._piece(number, piece) if known and piece in ("numbers", "texts") else None

    def evaluation(self, number: int) -> bytes | None:
        """An evaluation's texts, in the order of updates; None if there is none."""
        with self._guard:
            return self._texts(number) if 0 <= number < len(self._evaluations) else None

    def _content(self, since: int, place: Place) -> dict[str, Any]:
        now, tail = self._generation(), len(self._maker.waiting)
        counts = [*(part.rows for part in self._parts), *([tail] if tail else [])]
        parts, evaluations = [], []
        for number, rows in enumerate(counts):
            # The number of rows is in the path, so that a grown part has a new one.
            path = f"part/{now}-{number}-{rows}"
            pieces = {name: partial(self._piece, number, name) for name in ("numbers", "texts")}
            places = {name: place(f"{path}/{name}", make) for name, make in pieces.items()}
            parts.append({"rows": rows, **places})
        for number, update in enumerate(sorted(self._evaluations)):
            path = f"evaluation/{now}-{number}-{len(self._evaluations[update])}"
            evaluations.append({"update": update, "at": place(path, partial(self._texts, number))})
        return {
            **self.record.facts(),
            "generation": now,
            "bad_lines": self.record.bad_lines + self._files[COMPLETIONS].bad,
            "metrics": self.record.metrics(since),
            "completions": {"rows": sum(counts), "left_out": len(self._left_out), "parts": parts},
            "evaluations": evaluations,
        }

    def _piece(self, number: int, name: str) -> bytes:
        if number < len(self._parts):
            return getattr(self._parts[number], name)
        if self._tail is None or self._tail[0] != len(self._maker.waiting):
            self._tail = len(self._maker.waiting), self._maker.part()
        return getattr(self._tail[1], name)

    def _texts(self, number: int) -> bytes:
        return evaluation_piece(self._evaluations[sorted(self._evaluations)[number]], first=number == 0)

    def _refresh(self) -> None:
        self.record.refresh()
        size = self.record.config.get("rollout", {}).get("num_generations")
        self._maker.group_size = size if isinstance(size, int) else 0
        if any([file.restarted() for file in self._files.values()]):  # resumed, or started again: read it all
            generation = self._files[COMPLETIONS].generation + 1
            self._files = {name: LineFile(file.path, generation) for name, file in self._files.items()}
            self._maker, self._parts, self._tail = PartMaker(self._maker.group_size), [], None
            self._evaluations = {}
        completions, evaluations = self._files.values()
        for record in completions.read(None if self._stride == 1 else self._wanted):
            waiting = self._maker.waiting
            if len(waiting) >= ROWS and record.get("batch_step") != waiting[-1].get("batch_step"):
                self._parts.append(self._maker.part())
                self._maker.waiting, self._tail = [], None
            self._maker.add(record)
        read_evaluations(evaluations.read(), self._evaluations)

    def _wanted(self, line: bytes) -> bool:
        """Whether a line is of one of the evenly spread updates, of the last one, or of none."""
        found = _UPDATE.match(line)
        update = int(found[2]) if found else 1
        used = (update - 1) % self._stride == 0 or update == self.record.last("update")
        if not used:
            self._left_out.add(update)
        return used

    def _generation(self) -> int:
        return self.record.generation + self._files[COMPLETIONS].generation


def _seen(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns

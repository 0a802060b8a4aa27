"""A run's data for the page: read as its files grow, with completions and evaluations in pieces."""

from __future__ import annotations

import base64
import os
import re
import threading
from pathlib import Path
from typing import Any

from runners.files.json_lines import LineFile
from runners.files.run_files import COMPLETIONS, EVALUATIONS, EVENTS, METRICS
from runners.report.completion_rows import ROWS, Part, PartMaker, evaluation_piece, read_evaluations
from runners.report.page_json import packed
from runners.report.run_record import RunRecord

_UPDATE = re.compile(rb'\{"batch_step": (\d{1,18}), "update": (\d{1,18})')


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
        self._evaluations: dict[int, list[Any]] = {}
        self._most_bytes = most_bytes
        self._stride = max(self._needed_stride(), 1)  # of the updates whose completions are used
        self._left_out: set[int] = set()  # the other updates

    def signature(self) -> str:
        """A text that changes when a file has changed or the run has ended."""
        names = (METRICS, EVENTS, COMPLETIONS, EVALUATIONS)
        return f"{[_seen(self.record.folder / name) for name in names]}{self.record.state()}"

    def data(self) -> bytes:
        """The run's data for the live page, compressed, with its pieces in `blobs`."""
        with self._guard:
            self.record.refresh()
            seen = self.signature()
            content, pieces = self.content()
            blobs = {name: base64.b64encode(piece).decode("ascii") for name, piece in pieces.items()}
            return packed({"seen": seen, **content, "blobs": blobs})

    def content(self, prefix: str = "") -> tuple[dict[str, Any], dict[str, bytes]]:
        """The run's data for a page, and its pieces by the names that the data has for them."""
        self._refresh()
        now, waiting = self._files[COMPLETIONS].generation, self._maker.waiting
        parts = [*self._parts, *([self._maker.part()] if waiting else [])]
        pieces, placed, evaluations = {}, [], []
        for number, part in enumerate(parts):
            # The number of rows is in the name, so that a grown part has a new one.
            name = f"{prefix}part/{now}-{number}-{part.rows}"
            pieces |= {f"{name}/numbers": part.numbers, f"{name}/texts": part.texts}
            placed.append({"rows": part.rows, "numbers": f"{name}/numbers", "texts": f"{name}/texts"})
        for update, rows in sorted(self._evaluations.items()):
            name = f"{prefix}evaluation/{now}-{update}-{len(rows)}"
            pieces[name] = evaluation_piece(rows, first=not evaluations)
            evaluations.append({"update": update, "at": name})
        content = {
            **self.record.facts(),
            "bad_lines": self.record.bad_lines + self._files[COMPLETIONS].bad,
            "metrics": self.record.metrics(),
            "completions": {
                "rows": sum(part.rows for part in parts),
                "left_out": len(self._left_out),
                "parts": placed,
            },
            "evaluations": evaluations,
        }
        return content, pieces

    def _refresh(self) -> None:
        self.record.refresh()
        size = self.record.config.get("rollout", {}).get("num_generations")
        self._maker.group_size = size if isinstance(size, int) else 0
        over = any([file.restarted() for file in self._files.values()])  # resumed, or started again
        if self._needed_stride() > self._stride:  # the file has grown
            self._stride, over = 2 * self._needed_stride(), True
        if over:  # read it all
            generation = self._files[COMPLETIONS].generation + 1
            self._files = {name: LineFile(file.path, generation) for name, file in self._files.items()}
            self._maker, self._parts = PartMaker(self._maker.group_size), []
            self._evaluations, self._left_out = {}, set()
        completions, evaluations = self._files.values()
        for record in completions.read(None if self._stride == 1 else self._wanted):
            waiting = self._maker.waiting
            if len(waiting) >= ROWS and record.get("batch_step") != waiting[-1].get("batch_step"):
                self._parts.append(self._maker.part())
                self._maker.waiting = []
            self._maker.add(record)
        read_evaluations(evaluations.read(), self._evaluations)

    def _needed_stride(self) -> int:
        size = _seen(self.record.folder / COMPLETIONS)
        return -(-size[1] // self._most_bytes) if size and self._most_bytes else 0

    def _wanted(self, line: bytes) -> bool:
        """Whether a line is of one of the evenly spread updates, of the last one, or of none."""
        found = _UPDATE.match(line)
        update = int(found[2]) if found else 1
        used = (update - 1) % self._stride == 0 or update == self.record.last("update")
        if not used:
            self._left_out.add(update)
        return used


def _seen(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns

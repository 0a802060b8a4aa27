"""A run that is followed: reads its files as they grow, in pieces that a page can request one by one."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from runners.files.line_files import LineFile
from runners.files.run_files import COMPLETIONS, EVALUATIONS, EVENTS, LOCK, METRICS, TOKENS
from runners.report.completion_rows import (
    ROWS,
    Part,
    PartMaker,
    evaluation_pieces,
    part_of,
    read_evaluations,
    read_tokens,
)
from runners.report.page import group_size
from runners.report.page_json import packed
from runners.report.run_record import RunRecord

_WATCHED = (METRICS, EVENTS, COMPLETIONS, EVALUATIONS, TOKENS, LOCK)


class LiveRun:
    """The server's data of a run. Several threads may use it at the same time."""

    def __init__(self, folder: Path) -> None:
        """Reads nothing yet. UserError if the folder holds no run."""
        self.record = RunRecord(folder)
        self._guard = threading.Lock()
        self._files = {name: LineFile(folder / name) for name in (COMPLETIONS, EVALUATIONS, TOKENS)}
        self._maker, self._parts = PartMaker(), list[Part]()
        self._tokens: dict[int, dict[str, Any]] = {}
        self._evaluations: dict[int, list[dict[str, Any]]] = {}
        self._tail: tuple[tuple[int, ...], Part] | None = None  # the last part, and its inputs

    def summary(self) -> tuple[str, str, list[float | None]]:
        """The run's name, its state, and its last exact match, reward and update."""
        with self._guard:
            self.record.refresh()
            columns = [self.record.columns.get(name, []) for name in ("em", "reward", "update")]
            last = [next((value for value in reversed(each) if value is not None), None) for each in columns]
            return self.record.name, self.record.state(), last

    def signature(self) -> tuple[Any, ...]:
        """A value that changes when a file has changed or the run has ended."""
        return (*map(self._seen, _WATCHED), self.record.state())

    def data(self, generation: int, since: int) -> bytes:
        """The run's data for the page, compressed: the metrics from line `since` on if the reader's
        `generation` is still that of the files, else all of them."""
        with self._guard:
            self._refresh()
            now = self._generation()
            run = {**self.record.facts(), "generation": now}
            run["metrics"] = self.record.metrics(since if generation == now else 0)
            run["completions"] = self._completions(now)
            run["evaluations"] = [
                {"update": update, "at": f"evaluation/{now}-{i}-{len(self._evaluations[update])}"}
                for i, update in enumerate(sorted(self._evaluations))
            ]
            return packed(run)

    def part(self, number: int, piece: str) -> bytes | None:
        """A piece of a part: "numbers", "texts" or "tokens". None if there is none."""
        with self._guard:
            if number == len(self._parts) and self._maker.waiting:
                part = self._growing()
            elif 0 <= number < len(self._parts):
                part = self._parts[number]
            else:
                return None
        return {
            "numbers": part.numbers,
            "texts": part.texts,
            "tokens": part.tokens or packed(_NO_TOKENS),
        }.get(piece)

    def evaluation(self, number: int) -> bytes | None:
        """An evaluation's texts, in the order of updates; None if there is none."""
        with self._guard:
            pieces = [piece for _, piece in evaluation_pieces(self._evaluations)]
        return pieces[number] if 0 <= number < len(pieces) else None

    def _growing(self) -> Part:
        """The part that still grows; a page requests its pieces one by one."""
        made_of = (self._generation(), len(self._parts), len(self._maker.waiting), self._token_lines())
        if self._tail is None or self._tail[0] != made_of:
            self._tail = made_of, part_of(self._maker.waiting, self._tokens)
        return self._tail[1]

    def _token_lines(self) -> int:
        return sum(map(len, self._tokens.values()))

    def _refresh(self) -> None:
        self.record.refresh()
        self._maker.group_size = group_size(self.record)
        if any([file.restarted() for file in self._files.values()]):  # resumed, or started again: read it all
            generation = self._files[COMPLETIONS].generation + 1
            self._files = {name: LineFile(file.path, generation) for name, file in self._files.items()}
            self._maker, self._parts = PartMaker(self._maker.group_size), []
            self._tokens, self._evaluations = {}, {}
        completions, evaluations, tokens = self._files.values()
        # Tokens first: a part is closed when the next batch step's completions come, and has its tokens by
        # then.
        read_tokens(tokens.read(), self._tokens)
        for record in completions.read():
            waiting = self._maker.waiting
            if len(waiting) >= ROWS and record.get("batch_step") != waiting[-1].get("batch_step"):
                self._parts.append(self._maker.take(self._tokens))
                step = record.get("batch_step")
                if isinstance(step, int):
                    self._tokens = {each: value for each, value in self._tokens.items() if each >= step}
            self._maker.add(record)
        for update, rows in read_evaluations(evaluations.read()).items():
            self._evaluations.setdefault(update, []).extend(rows)

    def _completions(self, generation: int) -> dict[str, Any]:
        # The number of rows and of token lines is part of the address, so that a grown part has a new one.
        found = [(part.rows, 0, part.tokens is not None) for part in self._parts]
        if tail := len(self._maker.waiting):
            found.append((tail, self._token_lines(), bool(self._tokens)))
        parts = []
        for number, (rows, lines, has_tokens) in enumerate(found):
            at = f"part/{generation}-{number}-{rows}-{lines}"
            pieces = {piece: f"{at}/{piece}" for piece in ("numbers", "texts", "tokens")}
            parts.append({"rows": rows, **pieces} | ({} if has_tokens else {"tokens": None}))
        rows = sum(rows for rows, *_ in found)
        return {"rows": rows, "left_out": 0, "bad_lines": self._files[COMPLETIONS].bad, "parts": parts}

    def _generation(self) -> int:
        return self.record.generation + self._files[COMPLETIONS].generation

    def _seen(self, name: str) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self.record.folder / name)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


_NO_TOKENS = {"rows": [], "given": {}}

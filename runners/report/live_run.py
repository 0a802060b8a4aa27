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
from runners.files.run_files import COMPLETIONS, EVALUATIONS, EVENTS, LOCK, METRICS, TOKENS
from runners.report.completion_rows import (
    ROWS,
    Part,
    PartMaker,
    evaluation_piece,
    part_of,
    read_evaluations,
    read_tokens,
)
from runners.report.page_json import packed
from runners.report.run_record import RunRecord

_WATCHED = (METRICS, EVENTS, COMPLETIONS, EVALUATIONS, TOKENS, LOCK)


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
        self._files = {name: LineFile(folder / name) for name in (COMPLETIONS, EVALUATIONS, TOKENS)}
        self._maker, self._parts = PartMaker(), list[Part]()
        self._tokens: dict[int, dict[str, Any]] = {}
        self._evaluations: dict[int, list[dict[str, Any]]] = {}
        self._tail: tuple[tuple[int, ...], Part] | None = None  # the last part, and its inputs
        path = folder / COMPLETIONS
        size = os.path.getsize(path) if most_bytes and os.path.isfile(path) else 0
        self._stride = max(-(-size // (most_bytes or 1)), 1)  # of the updates whose completions are used
        self._left_out: set[int] = set()  # the other updates
        self._last = 0  # the last update

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
        """The run's data for the live page, compressed: the metrics from line `since` on if the reader's
        `generation` is still that of the files, else all of them."""
        with self._guard:
            self._refresh()
            since = since if generation == self._generation() else 0
            return packed(self._content(since, lambda path, _: path))

    def content(self, place: Place) -> dict[str, Any]:
        """The run's data for a page, with all pieces where `place` puts them."""
        self._refresh()
        return self._content(0, place)

    def _content(self, since: int, place: Place) -> dict[str, Any]:
        now, rows = self._generation(), 0
        # Rows, token lines and tokens of each closed part, and of the one that still grows.
        found = [(part.rows, 0, part.tokens is not None) for part in self._parts]
        if tail := len(self._maker.waiting):
            found.append((tail, self._token_lines(), bool(self._tokens)))
        parts, evaluations = [], []
        for number, (count, lines, has_tokens) in enumerate(found):
            # The number of rows and of token lines is in the path, so that a grown part has a new one.
            at, rows = f"part/{now}-{number}-{count}-{lines}", rows + count
            names = ("numbers", "texts", "tokens") if has_tokens else ("numbers", "texts")
            places = {name: place(f"{at}/{name}", partial(self._piece, number, name)) for name in names}
            parts.append({"rows": count, "tokens": None, **places})
        for number, update in enumerate(sorted(self._evaluations)):
            path = f"evaluation/{now}-{number}-{len(self._evaluations[update])}"
            evaluations.append({"update": update, "at": place(path, partial(self._texts, number))})
        bad = self._files[COMPLETIONS].bad
        return {
            **self.record.facts(),
            "generation": now,
            "metrics": self.record.metrics(since),
            "completions": {"rows": rows, "left_out": len(self._left_out), "bad_lines": bad, "parts": parts},
            "evaluations": evaluations,
        }

    def part(self, number: int, piece: str) -> bytes | None:
        """A piece of a part: "numbers", "texts" or "tokens". None if there is none."""
        with self._guard:
            known = 0 <= number < len(self._parts) + bool(self._maker.waiting)
            return self._piece(number, piece) if known and piece in ("numbers", "texts", "tokens") else None

    def evaluation(self, number: int) -> bytes | None:
        """An evaluation's texts, in the order of updates; None if there is none."""
        with self._guard:
            return self._texts(number) if 0 <= number < len(self._evaluations) else None

    def _piece(self, number: int, name: str) -> bytes:
        return (self._parts[number] if number < len(self._parts) else self._growing()).piece(name)

    def _texts(self, number: int) -> bytes:
        return evaluation_piece(self._evaluations[sorted(self._evaluations)[number]], first=number == 0)

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
        rollout = self.record.config.get("rollout")
        size = rollout.get("num_generations") if isinstance(rollout, dict) else None
        self._maker.group_size = size if isinstance(size, int) else 0
        logged = [value for value in self.record.columns.get("update", []) if value is not None]
        self._last, wanted = max(logged, default=0), None if self._stride == 1 else self._wanted
        if any([file.restarted() for file in self._files.values()]):  # resumed, or started again: read it all
            generation = self._files[COMPLETIONS].generation + 1
            self._files = {name: LineFile(file.path, generation) for name, file in self._files.items()}
            self._maker, self._parts = PartMaker(self._maker.group_size), []
            self._tokens, self._evaluations = {}, {}
        completions, evaluations, tokens = self._files.values()
        # Tokens first: a part is closed when the next batch step's completions come, and has its tokens by
        # then.
        read_tokens(tokens.read(wanted), self._tokens)
        for record in completions.read(wanted):
            waiting = self._maker.waiting
            if len(waiting) >= ROWS and record.get("batch_step") != waiting[-1].get("batch_step"):
                self._parts.append(self._maker.take(self._tokens))
                step = record.get("batch_step")
                if isinstance(step, int):
                    self._tokens = {each: value for each, value in self._tokens.items() if each >= step}
            self._maker.add(record)
        for update, rows in read_evaluations(evaluations.read()).items():
            self._evaluations.setdefault(update, []).extend(rows)

    def _wanted(self, line: bytes) -> bool:
        """Whether a line is of one of the evenly spread updates, of the last one, or of none."""
        found = _UPDATE.match(line)
        update = int(found[2]) if found else 1
        used = (update - 1) % self._stride == 0 or update == self._last
        if not used:
            self._left_out.add(update)
        return used

    def _generation(self) -> int:
        return self.record.generation + self._files[COMPLETIONS].generation

    def _seen(self, name: str) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self.record.folder / name)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

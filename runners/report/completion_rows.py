"""Completions in parts that a page can open one by one, with numbers and texts in separate pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import attrs

from runners.report.page_json import columns_json, deflated, packed

ROWS = 2048  # of a part
_TEXTS = ("completion", "prompt", "answer")
_MORE = ("metrics", "extra", "messages", "turns")


@attrs.frozen(eq=False)
class Part:
    """Some rows, each piece deflated JSON."""

    rows: int
    numbers: bytes  # columns for filters and sorting
    texts: bytes  # texts and other content of the rows
    tokens: bytes | None  # each row's tokens; None: unknown

    def piece(self, name: str) -> bytes:
        """ "numbers", "texts" or "tokens"."""
        found = getattr(self, name)
        return packed({"rows": [], "given": {}}) if found is None else found


@attrs.define(eq=False)
class PartMaker:
    """Collects the records of completions.jsonl, in order, into parts."""

    group_size: int = 0  # completions of a prompt in a batch step; 0: not known
    prompts: dict[str, int] = attrs.field(factory=dict)  # number of each prompt of the run
    waiting: list[dict[str, Any]] = attrs.field(factory=list)
    _group: int = -1
    _last: tuple[Any, Any, int] = (None, None, 0)  # batch step, prompt, rows of the group so far
    _row: int = 0  # of the batch step

    def add(self, record: dict[str, Any]) -> None:
        """Adds a record."""
        step, prompt = record.get("batch_step"), _text(record.get("prompt"))
        before, same, count = self._last
        if step == before and prompt == same and count != self.group_size:
            self._last = (step, prompt, count + 1)
        else:
            self._group += 1
            self._last = (step, prompt, 1)
        self._row = self._row + 1 if step == before else 0
        record["_row"] = self._row
        record["_group"] = self._group
        record["_prompt"] = self.prompts.setdefault(prompt, len(self.prompts))
        self.waiting.append(record)

    def take(self, tokens: Mapping[int, Mapping[str, Any]]) -> Part:
        """The collected part; `tokens` are the records of tokens.jsonl by batch step."""
        records, self.waiting = self.waiting, []
        return part_of(records, tokens)


def part_of(records: list[dict[str, Any]], tokens: Mapping[int, Mapping[str, Any]] | None) -> Part:
    """A part of these records."""
    rewards = [_table(record, "rewards") for record in records]
    names = dict.fromkeys(chain.from_iterable(rewards))
    numbers: dict[str, Any] = {
        "update": _column(records, "update"),
        "step": _column(records, "batch_step"),
        "group": [record["_group"] for record in records],
        "prompt": [record["_prompt"] for record in records],
        "reward": _column(records, "reward"),
        "advantage": _column(records, "advantage"),
        "tokens": _column(records, "tokens"),
        "finished": [0 if record.get("finished") is False else 1 for record in records],
        "rewards": {name: _column(rewards, name) for name in names},
    }
    if any("length_penalty" in record for record in records):
        numbers["penalty"] = _column(records, "length_penalty")
    known: dict[tuple[str, str], int] = {}
    asked = [
        known.setdefault((_text(record.get("prompt")), _text(record.get("answer"))), len(known))
        for record in records
    ]
    texts = {
        "asked": [list(pair) for pair in known],
        "of": asked,
        "completion": [_text(record.get("completion")) for record in records],
        "more": {
            str(row): _more(record) for row, record in enumerate(records) if any(map(record.get, _MORE))
        },
    }
    shown = _tokens(records, tokens) if tokens else None
    return Part(
        len(records), deflated(columns_json(numbers)), packed(texts), packed(shown) if shown else None
    )


def read_tokens(lines: Iterable[Mapping[str, Any]], known: dict[int, dict[str, Any]]) -> None:
    """Adds the records of tokens.jsonl to `known`, by batch step, as "sampled" and "moved"."""
    for line in lines:
        step, kind = line.get("batch_step"), line.get("kind")
        if isinstance(step, int) and kind in ("sampled", "moved"):
            known.setdefault(step, {})[kind] = line


def read_evaluations(lines: Iterable[Mapping[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The records of evaluations.jsonl by update; if an update was evaluated twice, the later ones."""
    found: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        update, problem = line.get("update"), line.get("problem")
        if isinstance(update, int):
            if problem == 0:
                found[update] = []
            found.setdefault(update, []).append(
                {name: _text(line.get(name)) for name in _TEXTS} | {"correct": line.get("correct") is True}
            )
    return found


def evaluation_piece(rows: Sequence[Mapping[str, Any]], *, first: bool) -> bytes:
    """An evaluation's compressed JSON. Only the first one contains the problems."""
    piece: dict[str, Any] = {
        "correct": [int(row["correct"]) for row in rows],
        "completion": [row["completion"] for row in rows],
    }
    if first:
        piece["problems"] = [[row["prompt"], row["answer"]] for row in rows]
    return packed(piece)


def _tokens(records: list[dict[str, Any]], tokens: Mapping[int, Mapping[str, Any]]) -> dict[str, Any] | None:
    """For each row its characters, log-probs, masked tokens and moves; None if nothing is known."""
    rows: list[Any] = []
    given: dict[str, int] = {}
    for record in records:
        step = record.get("batch_step")
        if not isinstance(step, int) or step not in tokens:
            rows.append(None)
            continue
        row = record["_row"]
        sampled, moved = tokens[step].get("sampled", {}), tokens[step].get("moved", {})
        cells = [_cell(sampled, name, row) for name in ("characters", "logp", "masked")]
        rows.append([*cells, _cell(moved, "moved", row)] if cells[0] is not None else None)
        if isinstance(sampled.get("given"), int):
            given[str(step)] = sampled["given"]
    return {"rows": rows, "given": given} if any(rows) else None


def _cell(record: Mapping[str, Any], name: str, row: int) -> str | None:
    cells = record.get(name)
    found = cells[row] if isinstance(cells, list) and row < len(cells) else None
    return found if isinstance(found, str) else None


def _column(records: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [record.get(name) for record in records]


def _table(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = record.get(name)
    return found if isinstance(found, dict) else {}


def _more(record: Mapping[str, Any]) -> dict[str, Any]:
    """A row's values logged by rewards, and its conversation, if there is one."""
    return {name: record[name] for name in _MORE if record.get(name)}


def _text(value: Any) -> str:
    """A text as it is; anything else as JSON."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)

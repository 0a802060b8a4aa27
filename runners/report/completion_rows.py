"""Completions in parts that a page can open one by one, with numbers and texts in separate pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from runners.report.page_json import packed, plain_numbers

ROWS = 2048  # of a part
_MORE = ("metrics", "extra", "messages")


@attrs.frozen(eq=False)
class Part:
    """Some rows, each piece deflated JSON."""

    rows: int
    numbers: bytes  # columns for filters and sorting
    texts: bytes  # texts and other content of the rows


@attrs.define(eq=False)
class PartMaker:
    """Collects the records of completions.jsonl, in order, into parts."""

    group_size: int = 0  # completions of a prompt in a batch step; 0: not known
    prompts: dict[str, int] = attrs.field(factory=dict)  # number of each prompt of the run
    waiting: list[dict[str, Any]] = attrs.field(factory=list)
    _group: int = -1
    _last: tuple[Any, Any, int] = (None, None, 0)  # batch step, prompt, rows of the group so far

    def add(self, record: dict[str, Any]) -> None:
        """Adds a record."""
        step, prompt = record.get("batch_step"), _text(record.get("prompt"))
        *same, count = self._last
        if same != [step, prompt] or count == self.group_size:
            self._group, count = self._group + 1, 0
        self._last = (step, prompt, count + 1)
        record["_group"] = self._group
        record["_prompt"] = self.prompts.setdefault(prompt, len(self.prompts))
        self.waiting.append(record)

    def part(self) -> Part:
        """The part that the collected records make."""
        records = self.waiting
        rewards = [_table(record.get("rewards")) for record in records]
        names = dict.fromkeys(name for given in rewards for name in given)
        numbers: dict[str, Any] = {
            "update": _column(records, "update"),
            "step": _column(records, "batch_step"),
            "group": [record["_group"] for record in records],
            "prompt": [record["_prompt"] for record in records],
            "reward": _column(records, "reward"),
            "advantage": _column(records, "advantage"),
            "tokens": _column(records, "tokens"),
            "finished": [int(record.get("finished") is not False) for record in records],
            "rewards": {name: _column(rewards, name) for name in names},
        }
        if any("length_penalty" in record for record in records):
            numbers["penalty"] = _column(records, "length_penalty")
        asked: dict[tuple[str, ...], int] = {}  # a group's rows share its prompt
        texts = {
            "of": [asked.setdefault(_asked(record), len(asked)) for record in records],
            "asked": list(asked),
            "completion": [_text(record.get("completion")) for record in records],
            "more": {
                row: {name: record[name] for name in _MORE if record.get(name)}
                for row, record in enumerate(records)
                if any(map(record.get, _MORE))
            },
        }
        return Part(len(records), packed(numbers), packed(texts))


def read_evaluations(lines: Iterable[Mapping[str, Any]], known: dict[int, list[Mapping[str, Any]]]) -> None:
    """Adds the records of evaluations.jsonl to `known`, by update; the later ones of an update done twice."""
    for line in lines:
        update, problem = line.get("update"), line.get("problem")
        if isinstance(update, int):
            if problem == 0:
                known[update] = []
            known.setdefault(update, []).append(line)


def evaluation_piece(rows: Sequence[Mapping[str, Any]], *, first: bool) -> bytes:
    """An evaluation's compressed JSON. Only the first one contains the problems.

    `correct` is null where there is no gold answer; `extracted` is what was read as the answer.
    """
    piece: dict[str, Any] = {
        "correct": [row["correct"] if isinstance(row.get("correct"), bool) else None for row in rows],
        "reward": _column(rows, "reward"),
        "extracted": [_text(row.get("extracted")) for row in rows],
        "completion": [_text(row.get("completion")) for row in rows],
    }
    return packed(piece | ({"problems": [_asked(row) for row in rows]} if first else {}))


def _asked(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Prompt, gold answer, and the prompt's other messages: a role and a text each."""
    context = record.get("context")
    messages = [_table(message) for message in context] if isinstance(context, list) else []
    others = [_text(message.get(name)) for message in messages for name in ("role", "content")]
    return (_text(record.get("prompt")), _text(record.get("answer")), *others)


def _column(records: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return plain_numbers([record.get(name) for record in records])


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    """A text as it is; anything else as JSON."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)

"""Prepares a run's data for the page: facts, metrics, and pieces that a browser opens one by one.

The pieces are deflated JSON: evaluations, and chunks of completions, with numbers and texts
separate.
"""

import itertools
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.errors import user_errors
from runners.files.json_files import read_lines, whole_number
from runners.files.run_files import COMPLETIONS, EVALUATIONS
from runners.report.run_record import RunRecord, plain_number

ROWS = 2048  # completions in a chunk
_MORE = ("metrics", "extra", "messages")
_LEVEL = 4  # zlib's level: 6 takes nearly three times as long and saves only an eighth


def run_data(
    folder: Path, most_bytes: int, prefix: str = ""
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns a run's data for a page, and the pieces by the names that the data uses for them.

    If completions.jsonl is larger than `most_bytes`, only evenly spaced updates are included.
    Raises UserError if the folder contains no run, or if a file cannot be read.
    """
    record = RunRecord(folder)
    pieces: dict[str, bytes] = {}
    left_out: set[int] = set()
    path = record.folder / COMPLETIONS
    size = path.stat().st_size if path.is_file() else 0
    stride = max(-(-size // most_bytes), 1)  # every stride-th update is used

    def used(line: Mapping[str, Any]) -> bool:
        """Returns whether a record belongs to an evenly spaced update, to the last one, or to no
        update.
        """
        update = whole_number(line.get("update")) or 1
        if (update - 1) % stride == 0 or update == record.last("update"):
            return True
        left_out.add(update)
        return False

    def placed(name: str, value: Any) -> str:
        # The name contains a checksum of the piece, because a browser caches pieces by name.
        piece = packed(value)
        at = f"{prefix}{name}-{zlib.crc32(piece):x}"
        pieces[at] = piece
        return at

    group_size = record.config.get("rollout", {}).get("num_generations")
    parts = []
    for rows in completion_parts(filter(used, read_lines(path)), group_size):
        name = f"part/{len(parts)}"
        parts.append(
            {
                "rows": len(rows),
                "numbers": placed(f"{name}/numbers", _numbers(rows)),
                "texts": placed(f"{name}/texts", _texts(rows)),
            }
        )
    evaluations = sorted(_evaluations(read_lines(record.folder / EVALUATIONS)).items())
    content = {
        **record.facts(),
        "metrics": {
            "lines": record.lines,
            "columns": record.columns,
            "nonfinite": record.nonfinite,
        },
        "completions": {
            "rows": sum(part["rows"] for part in parts),
            "left_out": len(left_out),
            "parts": parts,
        },
        "evaluations": [
            {
                "update": update,
                "at": placed(f"evaluation/{update}", _evaluation(rows, first=number == 0)),
            }
            for number, (update, rows) in enumerate(evaluations)
        ],
    }
    return content, pieces


def completion_parts(
    records: Iterable[dict[str, Any]], group_size: int | None
) -> Iterator[list[dict[str, Any]]]:
    """Yields the records in completions.jsonl in order, in chunks of about ROWS records. Each
    record gets its group number and its prompt number.

    `_group` and `_prompt` are numbers within the run. A group has at most `group_size` completions.
    """
    prompts: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    last: tuple[Any, Any] = (None, None)
    group = -1
    count = 0  # number of completions in the group
    for record in records:
        step = record.get("batch_step")
        prompt = _text(record.get("prompt"))
        if len(rows) >= ROWS and step != last[0]:
            yield rows
            rows = []
        if (step, prompt) != last or count == group_size:
            group += 1
            count = 0
        last = (step, prompt)
        count += 1
        rows.append(record | {"_group": group, "_prompt": prompts.setdefault(prompt, len(prompts))})
    if rows:
        yield rows


def packed(value: Any) -> bytes:
    """Returns a value as deflated JSON. Raises UserError for numbers that are not finite, which no
    run writes.
    """
    with user_errors(
        "a value in the run's files cannot be shown in a page", ValueError, RecursionError
    ):
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # a lone surrogate: its escape
    return zlib.compress(text.encode("utf-8", "backslashreplace"), _LEVEL)


def _numbers(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the columns for filtering and sorting."""
    rewards = [_table(record.get("rewards")) for record in records]
    names = dict.fromkeys(itertools.chain.from_iterable(rewards))
    columns = {name: _column(records, name) for name in ("update", "reward", "advantage", "tokens")}
    if any("length_penalty" in record for record in records):
        columns["penalty"] = _column(records, "length_penalty")
    return {
        **columns,
        "step": _column(records, "batch_step"),
        "group": [record["_group"] for record in records],
        "prompt": [record["_prompt"] for record in records],
        "finished": [int(record.get("finished") is not False) for record in records],
        "rewards": {name: _column(rewards, name) for name in names},
    }


def _texts(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    asked: dict[tuple[str, ...], int] = {}  # a group's rows share its prompt
    return {
        "of": [asked.setdefault(_asked(record), len(asked)) for record in records],
        "asked": list(asked),
        "completion": [_text(record.get("completion")) for record in records],
        "more": {
            row: {name: record[name] for name in _MORE if record.get(name)}
            for row, record in enumerate(records)
            if any(map(record.get, _MORE))
        },
    }


def _evaluations(lines: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """Groups the records in evaluations.jsonl by update."""
    known: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        update = line.get("update")
        if isinstance(update, int):
            known.setdefault(update, []).append(line)
    return known


def _evaluation(rows: Sequence[Mapping[str, Any]], *, first: bool) -> dict[str, Any]:
    """Returns an evaluation's columns. Only the first evaluation contains the problems.

    `correct` is null without a reference answer. `extracted` is the extracted answer.
    """
    piece: dict[str, Any] = {
        "correct": [
            row["correct"] if isinstance(row.get("correct"), bool) else None for row in rows
        ],
        "reward": _column(rows, "reward"),
        "extracted": [_text(row.get("extracted")) for row in rows],
        "completion": [_text(row.get("completion")) for row in rows],
    }
    return piece | ({"problems": [_asked(row) for row in rows]} if first else {})


def _asked(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the prompt, the reference answer, and the prompt's other messages, each with a role
    and a text.
    """
    context = record.get("context")
    asked = [_text(record.get("prompt")), _text(record.get("answer"))]
    for message in map(_table, context if isinstance(context, list) else []):
        asked += [_text(message.get("role")), _text(message.get("content"))]
    return tuple(asked)


def _column(records: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    values: list[Any] = [record.get(name) for record in records]
    if {*map(type, values)} == {float}:  # the usual case in a large file: twice as fast
        return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]
    return [plain_number(value) for value in values]


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    """Returns a text unchanged, None as an empty text, and any other value as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)

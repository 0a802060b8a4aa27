"""One HTML file of one run or several; it contains everything that it needs."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs

from runners.errors import UserError
from runners.files.line_files import LineFile
from runners.files.run_files import EVALUATIONS
from runners.report.completion_rows import (
    CompletionParts,
    evaluation_pieces,
    read_completions,
    read_evaluations,
)
from runners.report.page_json import packed
from runners.report.run_record import RunRecord

MOST_PAGE_BYTES = 96_000_000  # of completions.jsonl in a page, unless all is asked for
REPORT = "report.html"
_SCRIPTS = ("data.js", "format.js", "metrics.js", "charts.js", "overview.js", "rows.js", "tokens.js",
            "completions.js", "problems.js", "main.js")  # fmt: skip
_STYLES = ("page.css", "completions.css")


@attrs.frozen
class Written:
    """The result of `write_report`."""

    path: Path
    size: int  # bytes
    completions: int
    left_out: int  # updates whose completions are not in the page


def write_report(runs: Sequence[Path], out: Path, *, most_bytes: int = MOST_PAGE_BYTES) -> Written:
    """Writes the page of these runs' folders to `out`; a crash leaves the old file or the new one.

    Args:
        runs: one or several; several are shown in the same charts.
        out: the HTML file; its folder has to exist.
        most_bytes: if a run's completions.jsonl has more, those of evenly spread updates are used.

    Raises UserError for a folder that holds no run, and if the file cannot be written.
    """
    records = [RunRecord(Path(run)) for run in runs]
    blobs: list[bytes] = []
    shown, rows, left_out = [], 0, 0
    for record in records:
        record.refresh()
        updates = [value for value in record.columns.get("update", []) if value is not None]
        found = read_completions(
            record.folder,
            group_size(record),
            max(most_bytes // len(records), 1),
            int(max(updates, default=0)),
        )
        run = {**record.facts(), "metrics": record.metrics()}
        run["completions"] = _completions(found, blobs)
        evaluations = read_evaluations(LineFile(record.folder / EVALUATIONS).read())
        run["evaluations"] = [
            {"update": update, "at": _put(blobs, piece)} for update, piece in evaluation_pieces(evaluations)
        ]
        shown.append(run)
        rows, left_out = rows + found.rows, left_out + found.left_out
    first = _put(blobs, packed({"runs": shown}))
    title = " · ".join(record.name for record in records)
    text = page(title, blobs, {"mode": "file", "at": first})
    return Written(out, _save(out, text), rows, left_out)


def page(title: str, blobs: Sequence[bytes], start: dict[str, Any]) -> str:
    """The page's text. `blobs` are deflated JSON; `start` tells the script where to begin.

    The browser runs only scripts whose digests are in the page's head, loads nothing from elsewhere, and, for
    a file, makes no connections.
    """
    script, _ = _assets()
    connect = "'self'" if start["mode"] == "live" else "'none'"
    begin = json.dumps(start).replace("<", "\\u003c")
    body = [
        _asset("page.html"),
        f'<script type="application/json" id="start">{begin}</script>',
        *(
            f'<script type="application/octet-stream" id="blob-{number}">{_base64(blob)}</script>'
            for number, blob in enumerate(blobs)
        ),
        f"<script>{script}</script>",
    ]
    policy = f"script-src {_digest(script)}; connect-src {connect}"
    return _document(f"{title} – training report", "\n".join(body), policy)


def small_page(title: str, body: str, *, again: int) -> str:
    """A page without a script, from safe HTML; it reloads itself after `again` seconds."""
    name = html.escape(_printable(title))
    listing = f'<main class="listing"><h1>{name}</h1><div class="scroll">{body}</div></main>'
    return _document(title, listing, "script-src 'none'", f'<meta http-equiv="refresh" content="{again}">')


def _document(title: str, body: str, policy: str, more: str = "") -> str:
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; {policy}"
    _, style = _assets()
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f'<meta name="color-scheme" content="light dark">{more}',
        f"<title>{html.escape(_printable(title))}</title>",
        f'<link rel="icon" href="{_ICON}">',
        f"<style>{style}</style></head><body>",
        body,
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def group_size(record: RunRecord) -> int:
    """Completions of a prompt in a batch step, from the run's config; 0 if unknown."""
    rollout = record.config.get("rollout")
    found = rollout.get("num_generations") if isinstance(rollout, dict) else None
    return found if isinstance(found, int) else 0


def _completions(found: CompletionParts, blobs: list[bytes]) -> dict[str, Any]:
    parts = [
        {
            "rows": part.rows,
            "numbers": _put(blobs, part.numbers),
            "texts": _put(blobs, part.texts),
            "tokens": None if part.tokens is None else _put(blobs, part.tokens),
        }
        for part in found.parts
    ]
    return {"rows": found.rows, "left_out": found.left_out, "bad_lines": found.bad_lines, "parts": parts}


def _put(blobs: list[bytes], blob: bytes) -> int:
    blobs.append(blob)
    return len(blobs) - 1


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _save(out: Path, text: str) -> int:
    """Writes a temporary file beside `out` and renames it; returns its size in bytes."""
    content = text.encode("utf-8", "backslashreplace")
    try:
        number, name = tempfile.mkstemp(prefix=".report-", suffix=".html", dir=out.parent)
        try:
            with open(number, "wb") as stream:
                stream.write(content)
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, out)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}") from error
    return len(content)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@cache
def _assets() -> tuple[str, str]:
    """The page's script and style."""
    ours = "\n".join(_asset(name) for name in _SCRIPTS)
    script = f'{_asset("uplot/uPlot.iife.min.js")}\n(() => {{\n"use strict";\n{ours}\n}})();\n'
    return script, "\n".join(_asset(name) for name in ("uplot/uPlot.min.css", *_STYLES))


def _asset(name: str) -> str:
    return (files("runners.report") / "assets" / name).read_text(encoding="utf-8")


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _digest(script: str) -> str:
    return f"'sha256-{_base64(hashlib.sha256(script.encode()).digest())}'"


_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='16' "
    "height='16' rx='3' fill='%230f766e'/%3E%3Cpath d='M3 12l3-4 3 2 4-6' stroke='white' stroke-width='2' "
    "fill='none'/%3E%3C/svg%3E"
)

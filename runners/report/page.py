"""Writes a self-contained HTML file for one or several runs."""

import base64
import hashlib
import html
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import attrs

from runners.errors import UserError
from runners.files.durable import save_text
from runners.metrics import METRICS
from runners.report.run_data import packed, run_data

MOST_PAGE_BYTES = 96_000_000  # limit for completions.jsonl in a page, without --all
REPORT = "report.html"
_SCRIPTS = ("data.js", "format.js", "metrics.js", "charts.js", "overview.js", "rows.js", "texts.js",
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
    """Writes the page for these run folders to `out`.

    If a run's completions.jsonl is larger than `most_bytes`, only evenly spaced updates are
    included. Raises UserError for a folder without a run, and if the file cannot be written.
    """
    shown = []
    pieces: dict[str, bytes] = {}
    for number, run in enumerate(runs):
        content, more = run_data(run, max(most_bytes // len(runs), 1), f"{number}/")
        shown.append(content)
        pieces |= more
    pieces["start"] = packed({"runs": shown})
    text = page(" · ".join(run["name"] for run in shown), pieces, {"mode": "file", "at": "start"})
    encoded = text.encode("utf-8", "backslashreplace")  # a lone surrogate becomes an escape
    save_text(out, encoded.decode("utf-8"))
    return Written(
        out,
        size=len(encoded),
        completions=sum(run["completions"]["rows"] for run in shown),
        left_out=sum(run["completions"]["left_out"] for run in shown),
    )


def final_report(folder: Path, note: Callable[[str], None]) -> None:
    """Writes report.html into a run's folder. A failure only causes a message; the run is not
    affected.
    """
    try:
        write_report([folder], folder / REPORT)
    except (UserError, OSError, MemoryError) as error:
        note(f"no report was written: {error}; `grpo report RUN` tries again")


def page(title: str, pieces: Mapping[str, bytes], start: dict[str, Any]) -> str:
    """Returns the page's text. `pieces` are deflated JSON. `start` tells the script where to begin.

    The browser runs only scripts whose digests are in the page's head, and loads nothing from other
    origins; a page opened as a file makes no connections.
    """
    ours = "\n".join(map(_asset, _SCRIPTS))
    script = f'{_asset("uplot/uPlot.iife.min.js")}\n(() => {{\n"use strict";\n{ours}\n}})();\n'
    blobs = [
        f'<script type="application/octet-stream" id="blob-{name}">{base64_text(piece)}</script>'
        for name, piece in pieces.items()
    ]
    meanings = {metric.name: metric.meaning for metric in METRICS.values()}
    return Template(_asset("page.html")).substitute(
        title=html.escape(title),
        digest=base64_text(hashlib.sha256(script.encode()).digest()),
        connect="'self'" if start["mode"] == "live" else "'none'",
        style="\n".join(map(_asset, ("uplot/uPlot.min.css", *_STYLES))),
        script=script,
        start=json.dumps({**start, "metrics": meanings}).replace("<", "\\u003c"),
        pieces="\n".join(blobs),
    )


def _asset(name: str) -> str:
    return (files("runners.report") / "assets" / name).read_text(encoding="utf-8")


def base64_text(content: bytes) -> str:
    """Encodes bytes in base64, as the page contains them."""
    return base64.b64encode(content).decode("ascii")

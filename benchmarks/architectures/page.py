"""Writes the table of docs/models.md: a row for each architecture, from the outcomes of its test."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.architectures.trial import SLOWER, Outcome

BACKENDS = {"cpu": "a CPU", "cuda": "CUDA", "metal": "Metal"}
_COLUMNS = ("| architecture | verdict | notes |", "|---|---|---|")
_WITHOUT = {
    "lora": "LoRA on all linear layers",
    "packed": "LoRA on a packed base",
    "checkpointed": "`system.grad_checkpoint`",
    "reloaded": "the same logits once mlx-lm has read its weights again",
}


def write_page(page: Path, found: Mapping[str, Sequence[Outcome]], backend: str) -> None:
    """Replaces the page's table for this backend by a table of these outcomes.

    The CPU's table lists every architecture; the GPUs' tables list the rows that differ from it.
    """
    rows = {name: row_of(outcomes) for name, outcomes in found.items()}
    count = {verdict: sum(each[0] == verdict for each in rows.values()) for verdict in ("works", "slower")}
    counts = (
        f"Of {len(rows)} architectures {count['works']} work, {count['slower']} work slower, and "
        f"{len(rows) - sum(count.values())} are refused."
    )
    versions = " and ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    lines = [f"| `{name}` | {verdict} | {words} |" for name, (verdict, words) in rows.items()]
    text = page.read_text(encoding="utf-8")
    if backend != "cpu":
        right = [each.worst for outcomes in found.values() for each in outcomes if not each.fault]
        counts += (
            f" Log-probs and gradients differ from those on a CPU by at most {max(right):.1g}. Other rows:"
        )
        on_cpu = _parts(text, "cpu")[1].splitlines()
        lines = [line for line in lines if line not in on_cpu]
    table = [f"With {versions} on {BACKENDS[backend]}:", counts, "", *_COLUMNS, *lines, ""]
    before, _, after = _parts(text, backend)
    page.write_text(before + "\n".join(table) + after, encoding="utf-8")


def _parts(text: str, backend: str) -> tuple[str, str, str]:
    """The text before a backend's table, the table, and the text after it."""
    before, begin, rest = text.partition(f"<!-- table of {backend} -->\n")
    table, end, after = rest.partition("<!-- end of table -->\n")
    return before + begin, table, end + after


def row_of(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """The verdict, "works", "slower" or "refused", and notes."""
    faults = {each.step: each.fault for each in outcomes if each.fault}
    for step, fault in faults.items():
        if step not in _WITHOUT:
            return "refused", _cell(fault if step in ("load", "check") else f"{step}: {fault}")
    notes = dict.fromkeys(each.note for each in outcomes if each.note)
    verdict = "slower" if SLOWER in notes else "works"
    words = [f"not {_WITHOUT[step]} ({fault})" for step, fault in faults.items()]
    return verdict, _cell("; ".join([*(note for note in notes if note != SLOWER), *words]))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")

"""The table of docs/models.md: a row for each architecture, from the outcomes of its trial."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.architectures.trial import SLOWER, Outcome

_COLUMNS = ("| architecture | verdict | what is worth a word |", "|---|---|---|")
_WITHOUT = {
    "lora": "LoRA on all linear layers",
    "packed": "LoRA on a packed base",
    "checkpointed": "`system.grad_checkpoint`",
    "reloaded": "the same logits once mlx-lm has read its weights again",
}


def write_page(page: Path, found: Mapping[str, Sequence[Outcome]], backend: str) -> None:
    """Replace the page's table for this backend by one of these outcomes.

    The table of a CPU has every architecture, those of GPUs have the rows that differ from it.
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
        known = text.splitlines()
        lines = [line for line in lines if line not in known]
        counts += " These rows differ from those on a CPU:"
    where = {"cpu": "CPU", "cuda": "CUDA", "metal": "Metal"}[backend]
    table = [f"With {versions} on {where}:", counts, "", *_COLUMNS, *lines, ""]
    begin, end = f"<!-- table of {backend} -->\n", "<!-- end of table -->\n"
    before, rest = text.split(begin)
    after = rest.split(end, 1)[1]
    page.write_text(before + begin + "\n".join(table) + end + after, encoding="utf-8")


def row_of(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """The verdict, "works", "slower" or "refused", and what is worth a word."""
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

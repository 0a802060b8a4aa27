"""`python docs/manual/notebook.py`: makes docs/notebooks/first-run.ipynb of docs/first-run.md.

A block of shell or Python code becomes a cell that runs it, all other text a cell of Markdown. What stands in
a comment `<!-- notebook … -->` takes the place of the page's text from there to `<!-- notebook: end -->`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
PAGE, NOTEBOOK = DOCS / "first-run.md", DOCS / "notebooks" / "first-run.ipynb"
INSTALL = """\
# Installs grpo_fn if it is not there: from the clone that this notebook lies in, else by its name.
import importlib.util
import os
import pathlib
import sys
import sysconfig

if importlib.util.find_spec("grpo_fn") is None:
    clones = (
        folder for folder in pathlib.Path.cwd().parents if (folder / "grpo_entry.py").is_file()
    )
    wanted = f"{next(clones, 'grpo_fn')}{'[cpu]' if sys.platform == 'linux' else ''}"
    %pip install --quiet "{wanted}"
os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
os.environ |= {"TERM": "dumb", "COLUMNS": "130"}  # lines, no live display"""
_INSTEAD = re.compile(r"<!-- notebook\n(.*?)-->\n.*?<!-- notebook: end -->\n", re.DOTALL)
_CODE = re.compile(r"^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?=[\w-]+\.md)")


def made(page: str) -> str:
    """The notebook of a page, as JSON of nbformat 4.5 without outputs; a cell's id is its place."""
    text = _LINK.sub("](../", _INSTEAD.sub(r"\1", page))
    title, _, rest = text.partition("\n## ")
    before, *parts = _CODE.split(f"## {rest}")
    cells = [("markdown", title), ("code", INSTALL), ("markdown", before)]
    for language, code, after in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        code = code.replace(".venv/bin/", "").strip()
        code = re.sub("^", "!", code, flags=re.MULTILINE) if language == "sh" else code
        cells += [("code", code), ("markdown", after)]
    filled = [(kind, source.strip()) for kind, source in cells if source.strip()]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": [
            {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
            | ({"execution_count": None, "outputs": []} if kind == "code" else {})
            | {"source": source.splitlines(keepends=True)}
            for number, (kind, source) in enumerate(filled)
        ],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.parent.mkdir(exist_ok=True)
    NOTEBOOK.write_text(made(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

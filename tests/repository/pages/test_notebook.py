"""docs/notebooks/first-run.ipynb is what docs/first-run.md makes, and all of its cells run."""

import json
import os
import re
import runpy
import subprocess
import sys

import pytest

from tests.support.pages import ROOT

MAKER = runpy.run_path(str(ROOT / "docs" / "manual" / "notebook.py"))


def test_the_notebook_is_current():
    """Each cell has an id of its own, and none has an output."""
    text = MAKER["NOTEBOOK"].read_text(encoding="utf-8")
    assert text == MAKER["made"](MAKER["PAGE"].read_text(encoding="utf-8")), (
        "run python docs/manual/notebook.py"
    )
    assert "<!--" not in text and len({*re.findall(r'"id": "(.*)"', text)}) == len(json.loads(text)["cells"])


def test_every_cell_runs(tmp_path):
    """In an empty folder; a command that fails ends its cell, the run that was cut is resumed."""
    pytest.importorskip("nbmake", reason="nbmake and ipykernel are not installed: .ci/run installs them")
    notebook = json.loads(MAKER["NOTEBOOK"].read_text(encoding="utf-8"))
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in codes:
        if cell["source"][0].startswith("!"):
            cell["source"] += ["\nassert _exit_code == 0"]
    (tmp_path / "run.ipynb").write_text(json.dumps(notebook))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "--nbmake", "--overwrite", "--nbmake-timeout=600", "run.ipynb"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    kept["IPYTHONDIR"] = str(tmp_path / "ipython")
    done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout
    executed = json.loads((tmp_path / "run.ipynb").read_text(encoding="utf-8"))["cells"]
    printed = ["".join(t for out in c.get("outputs", ()) for t in out.get("text", ())) for c in executed]
    assert "eval after update 50: exact match 9" in "".join(printed)
    assert "--resume" in printed[-4] and "update 20/20" in printed[-2]
    assert "update 10/20" not in printed[-2] and "\x1b" not in "".join(printed)

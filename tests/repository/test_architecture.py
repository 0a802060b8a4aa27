"""docs/architecture.md is true: its paths exist, mechanisms have files and tests, imports follow it."""

import ast
import re

import pytest

from tests.support.pages import ROOT, codes, tables

PAGE = ROOT / "docs" / "architecture.md"
TEXT = PAGE.read_text(encoding="utf-8")
CORE = ROOT / "grpo_fn"
_TOP = "grpo_fn|runners|configs|benchmarks|tests|docs"
PATHS = sorted(set(re.findall(rf"(?<![\w/.])(?:{_TOP})(?:/[\w.-]+)+", TEXT)))


def lines_of(path):
    """Lines of a module, or of all modules of a folder."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def rows_of(*columns):
    """The rows of the page's tables with these columns."""
    found = [table for table in tables(PAGE) if table.header == columns]
    assert found, columns
    return [row for table in found for row in table.rows]


def room(module):
    """The folder of the core that a dotted module lies in; "helpers" for what lies in none."""
    folder = module.split(".")[1] if module.count(".") else ""
    return folder if folder and (CORE / folder).is_dir() else "helpers"


def imported():
    """(folder, folder) of every import between two folders of the core, wherever it stands."""
    for file in CORE.rglob("*.py"):
        parts = file.relative_to(CORE).parts
        own = parts[0] if len(parts) > 1 else "helpers"
        if parts == ("__init__.py",):  # the public names: from everywhere
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "grpo_fn":
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)][:2]
                modules = modules[1:] if node.module == "grpo_fn" else modules[:1]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names if alias.name.split(".")[0] == "grpo_fn"]
            yield from ((own, room(module)) for module in modules if room(module) != own)


def test_every_path_exists():
    """A file or a folder that the page names is there."""
    assert len(PATHS) > 80
    assert [path for path in PATHS if not (ROOT / path.rstrip(".-")).exists()] == []


def test_every_folder_is_on_the_page():
    """A new folder of the core or the shell gets its line."""
    folders = [
        f"{package}/{folder.name}"
        for package in ("grpo_fn", "runners")
        for folder in (ROOT / package).iterdir()
        if (folder / "__init__.py").exists()
    ]
    assert [folder for folder in folders if not re.search(rf"^{folder}/ ", TEXT, re.MULTILINE)] == []


MECHANISMS = rows_of("mechanism", "acts on", "where", "lines", "gain", "off-switch", "test")


@pytest.mark.parametrize("row", MECHANISMS, ids=lambda row: row[0])
def test_a_mechanism(row):
    """It names its files and a test; its lines are those of the files, to a third, or a part of them."""
    where, tests = codes(row[2]), codes(row[-1])
    assert where and tests and all(row)
    assert all(path.startswith("tests/") for path in tests)
    found = sum(lines_of(ROOT / path) for path in where)
    if row[3].startswith("≈"):
        assert 0 < int(row[3].removeprefix("≈")) <= found, found
    else:
        assert abs(int(row[3]) - found) <= found / 3, found


def test_every_module_of_the_backends_is_a_mechanism():
    """What makes something faster has its row."""
    named = " ".join(row[2] for row in MECHANISMS)
    modules = [path for path in (CORE / "backends").rglob("*.py") if path.name != "__init__.py"]
    shared = {"kernels.py"}  # what the kernels have in common
    assert [path.name for path in modules if path.name not in named and path.name not in shared] == []


def test_the_folders_import_what_the_page_says():
    """Each import between two folders of the core is allowed, or an exception; all exceptions exist."""
    allowed = {
        (folder.strip("`"), name if name == "helpers" else name.strip("`"))
        for cell, may in rows_of("folder", "may import")
        for folder in [cell.split(" ")[0]]
        for name in may.split(", ")
    }
    exceptions = {(codes(row[0])[0], codes(row[1])[0]) for row in rows_of("from", "to", "why")}
    found = set(imported())
    assert found - allowed - exceptions == set(), "not allowed by docs/architecture.md"
    assert exceptions - found == set(), "no longer there: remove it from docs/architecture.md"

"""The manual: its navigation has every page, and the parts that are made from the code are whole."""

import importlib.util
import inspect
import re
import runpy

import pytest

import grpo_fn as g
from tests.support.pages import ROOT
from tests.support.processes.new_process import python

PARTS = runpy.run_path(str(ROOT / "docs" / "manual" / "parts.py"))["PARTS"]
HOOKS = ROOT / "docs" / "manual" / "hooks.py"
HAS_MKDOCS = importlib.util.find_spec("mkdocs") is not None and importlib.util.find_spec("mkdocstrings")


def test_the_marked_places_are_known():
    """`<!-- made: NAME -->` names a part, and each part has a place."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    found = [name for text in texts for name in re.findall(r"^<!-- made: (\w+) -->$", text, re.MULTILINE)]
    assert sorted(found) == sorted(PARTS)


def test_every_public_function_is_in_the_reference():
    """With the module that defines it, once."""
    names = re.findall(r"^::: grpo_fn\.(\S+)$", PARTS["functions"](), re.MULTILINE)
    public = [name for name, value in vars(g).items() if name[0] != "_" and not inspect.ismodule(value)]
    assert sorted(name.rpartition(".")[2] for name in names) == sorted(public)
    assert not [name for name in names if "." not in name]


def test_drawings_are_of_the_diagrams_that_the_pages_have():
    """A diagram that was changed, or drawn by nobody, is refused with the command that draws it."""
    shown = runpy.run_path(str(ROOT / "docs" / "manual" / "drawings.py"))["shown"]
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert "![One training step" in shown("architecture", text) and "```mermaid" in text
    with pytest.raises(ValueError, match=r"architecture\.svg does not show .*drawings\.py MERMAID\.JS"):
        shown("architecture", text.replace("flowchart TD", "flowchart LR"))


@pytest.mark.skipif(not HAS_MKDOCS, reason="the extra docs is not installed: `make docs` builds the manual")
def test_the_manual_is_built_without_a_warning(tmp_path):
    """`mkdocs build --strict`: links and anchors lead somewhere; a config key has an anchor of its own."""
    python("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path)
    assert 'id="rollout.temperature"' in (tmp_path / "config.html").read_text(encoding="utf-8")
    whole = "".join(page.read_text(encoding="utf-8") for page in tmp_path.glob("*.html"))
    assert "<!-- made" not in whole
    # Nothing is loaded from elsewhere; material's script asks for mermaid where an element has this class.
    assert not re.search(r'<(script|img|iframe)[^>]+src="(https?:)?//|<link[^>]+stylesheet[^>]+//', whole)
    assert 'class="mermaid"' not in whole and 'src="manual/drawings/architecture.svg"' in whole
    assert (tmp_path / "manual" / "drawings" / "architecture.svg").is_file()
    moved = re.findall(r'^    "([\w-]+)": "([\w-]+\.html)#?([\w-]*)",$', HOOKS.read_text(), re.MULTILINE)
    for old, page, anchor in moved:
        assert f"url={page}" in (tmp_path / f"{old}.html").read_text(encoding="utf-8")
        assert f'id="{anchor}"' in (tmp_path / page).read_text(encoding="utf-8") or not anchor
    assert len(moved) > 12

"""docs/faq.md: each message that it shows is one that the code writes."""

import ast
import re

import pytest

from tests.support.pages import ROOT, snippets

PAGE = ROOT / "docs" / "faq.md"
MESSAGES = [
    (f"line {block.line}: {line[:40]}", line)
    for block in snippets(PAGE)
    if block.language == "text"
    for line in block.text.splitlines()
]


def texts_of(source):
    """The texts in a module's code, with … for each value in them."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            found.add("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


@pytest.fixture(scope="module")
def written():
    """All texts of the code, with one … where several values follow one another."""
    files = [file for name in ("grpo_fn", "runners") for file in (ROOT / name).rglob("*.py")]
    found = set().union(*(texts_of(file.read_text(encoding="utf-8")) for file in files))
    return {plain(text) for text in found}


def plain(text):
    """With one … where several values follow one another."""
    return re.sub(r"…(?:\s*…)+", "…", text)


def shown(message, texts):
    """Whether one of these texts has the message in it: its … stands for anything, at its ends too."""
    parts = plain(message).split("…")
    pattern, longest = re.compile(".*".join(map(re.escape, parts)), re.DOTALL), max(parts, key=len)
    return any(longest in text and pattern.search(text) for text in texts)


@pytest.mark.parametrize("message", [line for _, line in MESSAGES], ids=[name for name, _ in MESSAGES])
def test_the_message_exists(message, written):
    """A text of the code is this message."""
    assert shown(message, written)

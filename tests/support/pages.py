"""Reading the project's pages: snippets with the comments above them, tables, links and headings."""

import re
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[2]
_TOP = (ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY"))
PAGES = sorted(path for path in (*_TOP, *ROOT.glob("docs/*.md")) if path.is_file())

_COMMENT = re.compile(r"<!--\s*([a-z]+)(?::\s*(.*?))?\s*-->")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CELL = re.compile(r"(?<!\\)\|")


@attrs.frozen
class Snippet:
    """A fenced block: its place, language and text, and the comments directly above it."""

    page: Path
    line: int
    language: str
    text: str
    comments: dict[str, str]

    @property
    def id(self) -> str:
        """`rewards.md:31`, as a test's name."""
        return f"{self.page.name}:{self.line}"


@attrs.frozen
class Table:
    """A table: its header cells and its rows of cells."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def snippets(page: Path) -> Iterator[Snippet]:
    """The fenced blocks of a page in their order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    comments: dict[str, str] = {}
    opened: int | None = None
    for number, line in enumerate(lines):
        if opened is not None:
            if line.strip() == "```":
                text = "\n".join(lines[opened + 1 : number]) + "\n"
                yield Snippet(page, opened + 1, lines[opened].strip("` "), text, comments)
                opened, comments = None, {}
        elif line.startswith("```"):
            opened = number
        elif found := _COMMENT.fullmatch(line.strip()):
            comments[found[1]] = found[2] or ""
        elif line.strip():
            comments = {}
    assert opened is None, f"{page.name}: the block of line {opened} is not closed"


def prose(page: Path) -> list[str]:
    """The lines of a page outside fenced blocks."""
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            lines.append(line)
    return lines


def tables(page: Path) -> list[Table]:
    """The tables of a page in their order."""
    found: list[Table] = []
    block = []
    for line in [*prose(page), ""]:
        if line.startswith("|"):
            block.append(tuple(cell.strip() for cell in _CELL.split(line.strip())[1:-1]))
            continue
        if block:
            found.append(Table(block[0], tuple(block[2:])))
            block = []
    return found


def links(page: Path) -> list[str]:
    """The targets of a page's links that stay inside the project."""
    text = re.sub(r"`[^`]*`", "", "\n".join(prose(page)))
    return [target for target in _LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = [line.lstrip("# ") for line in prose(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def codes(cell: str) -> list[str]:
    """The texts in backticks."""
    return re.findall(r"`([^`]+)`", cell)

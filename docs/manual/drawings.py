"""`python docs/manual/drawings.py MERMAID.JS`: draws the pages' mermaid diagrams as pictures for the manual.

The manual shows docs/manual/drawings/PAGE.svg in place of a diagram, so that its pages ask no other server
for mermaid, a script of 3 MB. MERMAID.JS is `dist/mermaid.min.js` of the npm package (`npm pack mermaid@11`);
playwright and Chromium draw (the extra `browser`). A picture holds the digest of its source: an old one ends
the build.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
DRAWINGS = Path(__file__).resolve().parent / "drawings"
FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "{startOnLoad: false, theme: 'neutral', htmlLabels: false, "
    "flowchart: {htmlLabels: false, wrappingWidth: 320}}"
)


def mark(source: str) -> str:
    """What stands at the end of a picture of this source."""
    return f"<!-- source {hashlib.sha256(source.encode()).hexdigest()} -->"


def shown(page: str, text: str) -> str:
    """A page's text with its picture in place of its diagram. Raises ValueError where that is of another one.

    `page` is the page's name without `.md`.
    """
    found = FENCE.findall(text)
    if not found:
        return text
    path = DRAWINGS / f"{page}.svg"
    again = "draw it with `python docs/manual/drawings.py MERMAID.JS`"
    if len(found) > 1:
        raise ValueError(f"docs/{page}.md: found {len(found)} diagrams, wanted one a page")
    if not path.is_file() or mark(found[0]) not in path.read_text(encoding="utf-8"):
        raise ValueError(
            f"{path.relative_to(DOCS.parent)} does not show the diagram of docs/{page}.md: {again}"
        )
    title = re.search(r"^ *accTitle: *(.+)$", found[0], re.MULTILINE)
    words = title[1] if title else "Diagram"
    return FENCE.sub(lambda _: f"![{words}](manual/drawings/{page}.svg){{ .drawing }}", text)


def draw(script: Path) -> None:
    """Draws all of them again."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.exit(f"a drawing needs a browser: none of {', '.join(BROWSERS)} was found")
    DRAWINGS.mkdir(exist_ok=True)
    with sync_playwright() as found:
        browser = found.chromium.launch(executable_path=program, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.add_script_tag(path=script)
        for page in sorted(DOCS.glob("*.md")):
            for source in FENCE.findall(page.read_text(encoding="utf-8")):
                picture = tab.evaluate(
                    f"async (text) => {{ mermaid.initialize({OPTIONS}); "
                    "const { svg } = await mermaid.render('drawing', text); "
                    "return new XMLSerializer().serializeToString("
                    "new DOMParser().parseFromString(svg, 'text/html').querySelector('svg')); }",
                    source,
                )
                wide, high = re.search(r'viewBox="0 0 (\S+) (\S+)"', picture).groups()
                picture = picture.replace('width="100%"', f'width="{wide}" height="{high}"', 1)
                path = DRAWINGS / f"{page.stem}.svg"
                path.write_text(f"{picture}\n{mark(source)}\n", encoding="utf-8")
                print(path)
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    draw(Path(sys.argv[1]))

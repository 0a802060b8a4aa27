"""What mkdocs runs while it builds the manual: adds pages from outside of docs/, and parts from the code."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from drawings import shown  # noqa: E402 (beside this file: mkdocs puts its folder on the path)
from parts import PARTS  # noqa: E402

from benchmarks.harness.report import NAMES, RESULTS, manual_pages  # noqa: E402

OUTSIDE = {  # file of the repository → page of the manual
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/results/metal/README.md": "metal-results.md",
    "README.md": "index.md",
}
INSTEAD = {"README.md#your-own-loop": "own-loop.md"}
"""What README.md has for those who read it on its own, and where the manual has it."""
MOVED = {
    "base-models": "own-data.html#base-models",
    "curriculum": "cold-start.html#prompts-by-pass-rate",
    "export": "conversion.html#grpo-export",
    "faq": "troubleshooting.html",
    "faults": "troubleshooting.html",
    "first-reward": "own-data.html",
    "from-mlx-lm-lora": "migrating.html#mlx-lm-lora",
    "from-trl": "migrating.html#trl",
    "from-verl": "migrating.html#verl",
    "metal": "memory.html#on-a-mac",
    "sft": "cold-start.html#supervised-updates",
    "tasks": "your-task.html#tasks-with-their-own-rewards",
    "teacher": "cold-start.html#a-teacher",
}
"""Former page → its current address."""

_FENCE = re.compile(r"^\s*```")
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_NOTEBOOK = re.compile(r"^<!-- notebook\n.*?-->\n", re.DOTALL | re.MULTILINE)
_PART = re.compile(r"^<!-- made: (\w+) -->$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Adds the benchmarks' pages to the navigation, and leaves out pages that may be missing, and are."""
    config.nav.append({"Benchmarks": [{name: f"benchmarks/{name}.md"} for name in NAMES]})
    missing = {
        name for name in config.extra["later"] if not (Path(config.docs_dir) / name).exists()
    }
    for section in config.nav:
        for title, pages in section.items():
            if isinstance(pages, list):
                section[title] = [page for page in pages if not missing & {*page.values()}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from outside of docs/ and those with results, and the pictures that they show."""
    for source, page in OUTSIDE.items():
        if page != "index.md":  # the first page of the manual is its own
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=text))
    for page, text in manual_pages(RESULTS).items():
        if (former := files.get_file_from_path(page)) is not None:
            files.remove(former)
        files.append(File.generated(config, page, content=text))
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.svg")):
        where = f"results/{picture.name}"
        files.append(File.generated(config, where, abs_src_path=str(picture)))
    return files


def on_post_build(config: Any) -> None:
    """Former addresses redirect."""
    for page, target in MOVED.items():
        text = f'<meta http-equiv="refresh" content="0; url={target}"><a href="{target}">{target}</a>\n'
        (Path(config.site_dir) / f"{page}.html").write_text(text, encoding="utf-8")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A page's links lead to pages of the manual; marked places get what is made from the code."""
    source = next((key for key, name in OUTSIDE.items() if name == page.file.src_uri), None)
    if source is None or page.file.src_uri == "index.md":
        source = f"docs/{page.file.src_uri}"
    text = _NOTEBOOK.sub("", shown(Path(page.file.src_uri).stem, markdown))
    text = _PART.sub(lambda found: PARTS[found[1]](), text)
    if source == "docs/config.md":
        text = _with_anchors(text)
    lines, inside = [], False
    for line in text.split("\n"):
        inside ^= bool(_FENCE.match(line))
        lines.append(line if inside else _LINK.sub(lambda found: _link(found, source), line))
    return "\n".join(lines)


def _with_anchors(text: str) -> str:
    """The config's tables, with an anchor for each key, such as `config.html#rollout.temperature`."""
    lines, section = [], ""
    for line in text.split("\n"):
        if heading := re.match(r"## \[(\w+)\]$", line):
            section = heading[1]
        elif line.startswith("## "):
            section = ""
        if section and (row := re.match(r"\| `([\w.]+)` \|", line)):
            line = f"| `{row[1]}`{{ #{section}.{row[1]} }} |{line[row.end() :]}"
        lines.append(line)
    return "\n".join(lines)


def _link(found: re.Match[str], source: str) -> str:
    """A link of a file of the repository, as one between pages; its text alone where it leads to code."""
    target = found["target"]
    if re.match(r"[a-z]+:", target) or target.startswith("#"):
        return found[0]
    path, _, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    whole = f"{path}#{anchor}" if anchor else path
    if whole in INSTEAD:
        page, anchor = INSTEAD[whole], ""
    elif path in OUTSIDE:
        page = OUTSIDE[path]
    elif path.startswith("docs/"):
        page = path.removeprefix("docs/")
    elif re.fullmatch(r"benchmarks/results/(\w+)\.json", path):
        page = f"benchmarks/{Path(path).stem}.md"
    elif path.startswith("benchmarks/results/"):
        page = path.removeprefix("benchmarks/")
    else:
        return found["text"]
    here = posixpath.dirname(OUTSIDE.get(source, source.removeprefix("docs/")))
    page = posixpath.relpath(page, here)
    return f"{found['image']}[{found['text']}]({page}{'#' + anchor if anchor else ''})"

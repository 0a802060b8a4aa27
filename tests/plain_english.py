"""`python -m tests.plain_english`: finds phrases of translated English in pages, messages and docstrings.

Each phrase is listed with a plainer wording. Add a phrase once the tree is free of it. In pages, only prose
is read: no code, and no tables that are made from the code, whose own strings are read.

`--draw SEED` prints random sentences instead, 15 each from four sources, for readers to judge.
"""

import ast
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PHRASES = {
    r"teach(es)? nothing": "has no gradient",
    r"(groups?|prompts?) that taught": "with a gradient",
    r"(the|a) groups? taught": "has a gradient",
    r"by heart": "overfits",
    r"nothing would come of": "A requires B",
    r"one update a rollout": "one update per rollout",
    r"makes? no bias": "is unbiased",
    r"its exponential": "exp(…)",
    r"among how many": "the number of",
    r"asks? for nothing": "no action needed",
    r"the same three": "the rows above",
    r"whatever their names?": "any other file",
    r"a second way to the same": "with the same result",
    r"(command|run|it|and) ends? with a line": "stops with a message",
    r"mend(s|ed|ing)?": "fix",
    r"falls? apart": "diverges",
    r"unlearns?": "forgets",
    r"so many (bits|pixels|problems|completions|samples)": "this many",
    r"(would|will) have gone on": "continues",
    r"cross-entropy of their tokens": "cross-entropy of the … tokens",
    r"what one brings": "its gain",
    r"a fortieth of a core": "2.5 % of one core",
    r"evenly spread updates": "evenly spaced updates",
    r"what is known of": "the statistics of",
    r"gold (answer|completion|label|text|one)s?": "reference answer, reference completion",
    r"(go(es)?|gone) on (from|with|where)": "resumes from, continues with",
    r"(completions?|prompts?|rollouts?|tokens?|groups?) (is|are|was|were) drawn": "sampled",
    r"(it|they|the model|a model|which) (is|are|was|were) asked (in|as)": "prompt format",
    r"nothing is learned": "there is no gradient",
    r"as people mean": "by value",
    r"without a word": "without a message",
    r"a line says": "a message says",
    r"a \w+ of (yours|mine)": "your own …",
    r"an? (loop|reward|file|template|tool|process|folder) of (your|its|their) own": "your own …",
    r"whole checkpoints?": "complete checkpoint",
    r"counts? nowhere": "is masked",
    r"something in the \w+ (has|have) to change": "must be changed",
    r"how far the run is": "progress of the run",
    r"(behind|stands behind) the (question|prompt|number|text|last|policy's|assistant's)": "after",
    r"(?-i:Of an?) \w+": "For a …, In a …",
    r"but for the": "except",
    r"used up what (it|they) may": "reached its limit",
    r"rows of nobody": "padding rows",
    r"what (came|comes|has come) of": "the outcome of",
    r"bit for bit each time": "bit-identical",
    r"one update an? \w+": "one update per …",
    r"(is|are|be|not) to be had": "is available",
    r"as wanted": "as expected",
    r"the whole's": "the whole batch's",
    r"names no (folder|file)": "is not a folder",
    r"or its like": "or a similar …",
    r"excludes? each other": "cannot be combined",
    r"(the same|equal) but for": "the same except",
    r"with its name back": "renamed back",
    r"got (HTTP|an answer|a score|no answer)": "received",
    r"(answers?|numbers?|words?) behind": "after",
}
"""Pattern → what to write instead, for pages and all strings of the packages; a blank is any white space."""
_NOT_PROSE = re.compile(
    r"^```.*?^```|^<!-- (?P<part>[^>]+):begin -->.*?^<!-- (?P=part):end -->|<!--.*?-->|`[^`\n]*`|\]\([^)]*\)",
    re.DOTALL | re.MULTILINE,
)


def faults(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, found phrase and what to write instead, for each phrase that the text contains."""
    for pattern, instead in PHRASES.items():
        spaced = pattern.replace(" ", r"\s+")
        for found in re.finditer(rf"(?<!\w)(?:{spaced})(?!\w)", text, re.IGNORECASE):
            yield text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), instead


def prose(page: str) -> str:
    """A page's text with the same lines; what is not prose is replaced by dots."""
    return _NOT_PROSE.sub(lambda part: re.sub(r"[^\n]", "·", part[0]), page)


def strings(code: str) -> Iterator[tuple[int, str]]:
    """The texts in a Python file, docstrings included, with their first lines."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def faults_of(path: Path) -> list[str]:
    """`file:line: found → instead` for each phrase in a page or a Python file."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    parts = [(1, prose(text))] if path.suffix == ".md" else list(strings(text))
    return [
        f"{name}:{first + line - 1}: {found!r}; plainer: {instead}"
        for first, part in parts
        for line, found, instead in faults(part)
    ]


def all_faults() -> list[str]:
    """The faults of the project's pages and packages."""
    tops = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    packages = [path for package in ("grpo_fn", "runners") for path in (ROOT / package).rglob("*.py")]
    return [
        line for path in sorted([*tops, *(ROOT / "docs").glob("*.md"), *packages]) for line in faults_of(path)
    ]


def _sentences(texts: Iterable[str]) -> list[str]:
    """Their sentences with at least six words, each once, in a fixed order."""
    plain = (" ".join(text.split()).replace("``", "`") for text in texts)
    ends = r"(?:(?<=[.!?])|(?<=[.!?]\)))(?<!Dr\.)(?<!\*\*\d\.)\s+(?=[A-Z`*\[(])"
    parts = (part for text in plain for part in re.split(ends, text))
    return sorted({part for part in parts if len(part.split()) >= 6 and "|" not in part})


def _page_texts() -> Iterator[str]:
    """The paragraphs and list items of README.md and docs/, without tables, headings and code blocks."""
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = re.sub(
            r"^ *```.*?^ *```|^<!-- (.+?):begin -->.*?^<!-- \1:end -->|<!--.*?-->",
            "",
            page.read_text(),
            flags=re.DOTALL | re.MULTILINE,
        )
        lines = "\n".join("" if line.startswith(("|", "#", "!")) else line for line in text.splitlines())
        parts = re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. )", lines)
        yield from (re.sub(r"^\s*(?:[-*]|\d+\.) ", "", part) for part in parts)


def _code_texts(*packages: str) -> tuple[list[str], list[str]]:
    """The messages and the public docstrings of packages; filled-in parts of a message are an ellipsis."""
    messages, docstrings = [], []
    for path in (file for package in packages for file in (ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [node for node in ast.walk(tree) if isinstance(node, owners)]
        public = [node for node in found if getattr(node, "name", "module")[0] != "_"]
        docstrings += [text for node in public for text in _docstring_texts(ast.get_docstring(node) or "")]
        if path.name not in ("sections.py", "metrics.py"):
            messages += [_filled(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return messages, docstrings


def _docstring_texts(docstring: str) -> Iterator[str]:
    """The paragraphs, list items and argument entries of a docstring, without indented formulas."""
    for part in re.split(r"\n\s*\n", docstring):
        heading, _, entries = part.partition(":\n")
        if heading in ("Args", "Attributes", "Raises"):
            yield from re.split(r"\n {4}(?=\S)", "\n" + entries)
        elif heading in ("Returns", "Yields"):
            yield entries
        elif not part.startswith(" "):
            yield from re.split(r"\n- ", part)


def _filled(call: ast.Call) -> str:
    """The first text of a call, with its filled-in parts as an ellipsis."""
    for node in [*call.args, *(keyword.value for keyword in call.keywords)]:
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(getattr(part, "value", "…")) if isinstance(part, ast.Constant) else "…"
                for part in node.values
            )
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
    return ""


def draw(seed: int, count: int = 15) -> Iterator[str]:
    """Random sentences of pages, of the meanings of keys and metrics, of messages, and of docstrings."""
    from runners.config.loading import KEYS
    from runners.metrics import METRICS

    messages, docstrings = _code_texts("runners"), _code_texts("grpo_fn", "runners")
    meanings = [field.metadata["meaning"] for field in KEYS.values()]
    meanings += [text for row in METRICS.values() for text in (row.meaning, row.normal, row.otherwise)]
    sources = {
        "pages": _page_texts(),
        "meanings": meanings,
        "messages": messages[0],
        "docstrings": docstrings[1],
    }
    rng = random.Random(seed)
    yield f"seed {seed}"
    for name, texts in sources.items():
        yield f"\n{name}"
        yield from (f"- {text}" for text in rng.sample(_sentences(texts), count))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--draw"]:
        print(*draw(int(sys.argv[2])), sep="\n")
        raise SystemExit
    found = all_faults()
    print("\n".join(found) or "no phrase of the list was found")
    raise SystemExit(bool(found))

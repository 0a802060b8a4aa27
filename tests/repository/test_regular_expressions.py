"""Every regular expression of the shell takes time linear in the text: models and files write it."""

import ast
import collections
import functools
import importlib
import itertools
import re
import time
from pathlib import Path

import pytest

import runners

_ROOT = Path(runners.__file__).parent
_METHODS = {"match", "fullmatch", "search", "findall", "finditer", "sub", "split"}
_OF_RE = {f"re.{name}" for name in _METHODS | {"compile"}}
_LENGTH = 20_000  # characters of a text
_BOUNDED = {"_NUMBER": 100}  # name: the most characters that its caller lets through
_OF_THE_USER = {
    "pattern",  # in what resolves a config's own
    "argument",  # of answer.form = "regex:…", which a process with limits reads
    r"f'\\b{name}\\b'",  # a name of ours, in our own error
}
_LONGEST = 0.1  # seconds of CPU; a quadratic search of this length takes 0.2 at least
_SAMPLES = {"CATEGORY_DIGIT": "7", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "w"}


def _found():
    """(pattern, the method that it is used with, the text's length) of every pattern in runners."""
    texts = {path: path.read_text() for path in sorted(_ROOT.rglob("*.py"))}
    everything = "\n".join(texts.values())
    for path, text in texts.items():
        calls = {}  # of re: call -> the name that it is assigned to
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                calls.setdefault(ast.unparse(node), (node, ""))
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                calls[ast.unparse(node.value)] = (node.value, ast.unparse(node.targets[0]))
        for node, name in calls.values():
            if ast.unparse(node.func) not in _OF_RE or ast.unparse(node.args[0]) in _OF_THE_USER:
                continue
            module = importlib.import_module(".".join(path.relative_to(_ROOT.parent).with_suffix("").parts))
            pattern = eval(f"re.compile({ast.unparse(node.args[0])})", {"re": re} | vars(module))
            pattern = vars(module).get(name, pattern)
            used = set(re.findall(rf"\b{name}\.(\w+)\(", everything)) if name else {node.func.attr}
            for method in sorted(used & _METHODS):
                place = f"{path.relative_to(_ROOT)}:{node.lineno} {method}"
                yield pytest.param(pattern, method, _BOUNDED.get(name, _LENGTH), id=place)


def _witness(parsed):
    """A text that the parsed pattern matches, or nearly: each repeat once, of alternatives the first."""
    text = ""
    for kind, value in parsed:
        match str(kind):
            case "LITERAL":
                text += chr(value)
            case "IN":
                (chosen, of), *_ = value
                text += {"LITERAL": chr, "RANGE": lambda of: chr(of[0])}.get(
                    str(chosen), lambda of: _SAMPLES.get(str(of), "~")
                )(of)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                text += _witness(value[2]) * max(value[0], 1)
            case "SUBPATTERN":
                text += _witness(value[3])
            case "ATOMIC_GROUP":
                text += _witness(value)
            case "BRANCH":
                text += _witness(value[1][0])
            case "ANY" | "NOT_LITERAL":
                text += "~"
    return text


def _attacks(pattern, length):
    """Starts of a matching text, then a part of it over and over, then what does not match."""
    whole = _witness(re._parser.parse(pattern.pattern))
    units = {*whole, *map("".join, itertools.pairwise(whole)), whole}
    for cut in range(len(whole) + 1):
        for unit in units:
            for end in ("", "\0", f".{unit}.{unit}"):
                yield (whole[:cut] + unit * (length // len(unit) + 1))[: length - len(end)] + end


@pytest.mark.parametrize(("pattern", "method", "length"), _found())
def test_no_text_takes_more_than_linear_time(pattern, method, length):
    """Of thousands of texts that nearly match."""
    for text in _attacks(pattern, length):
        subject = text.encode() if isinstance(pattern.pattern, bytes) else text
        call = functools.partial(getattr(pattern, method), *(["x"] if method == "sub" else []), subject)
        # Three times at most: a busy machine has slow moments.
        assert any(_seconds(call) < _LONGEST for _ in range(3)), (text[:40], text[-40:])


def _seconds(call):
    """Of this thread's CPU time; of an iterator, until its end."""
    started = time.thread_time()
    collections.deque(found if hasattr(found := call(), "__next__") else (), maxlen=0)
    return time.thread_time() - started

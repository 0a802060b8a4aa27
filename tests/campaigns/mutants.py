"""Breaks the code in one place at a time, and checks that the tests notice: `-m tests.campaigns.mutants`.

mutants.txt has the places. Each mutant replaces one piece of code, which must occur exactly once, in a
temporary copy of the packages, and runs the tests of its section on that copy. Names given on the command
line choose mutants. Exit status 1: a mutant survived, or the tests are red without any.

A line is, with two spaces between its parts: NAME [@SCOPE] CODE => WRONG. CODE is looked for in all of
grpo_fn and runners, or in SCOPE, a function, a method, a class or a module, whatever the line breaks. As
CODE, `adamw(weight_decay=)` is the value of this argument in the one call of `adamw` that has it, and
`adamw(#1)` that of the second positional argument. A line of "~" and keys of the config makes a
mutant of each: it forgets what the key says.
"""

import argparse
import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("grpo_fn", "runners")
COPIED = (*PACKAGES, "tests", "benchmarks", "configs", "pyproject.toml")
# After this the key has its default, whatever is set.
FORGETS = """

_own = {kind}.__init__
{kind}.__init__ = lambda self, **keys: _own(self, **{{name: keys[name] for name in keys if name != "{key}"}})
"""
ARGUMENT = re.compile(r"(\w+)\((?:(\w+)=|#(\d))\)")


class Mutant(NamedTuple):
    """One wrong line."""

    name: str
    scope: str  # "": anywhere
    right: str
    wrong: str
    tests: tuple[str, ...]  # the names of test modules that have to notice it


class Place(NamedTuple):
    """Characters of a file, from its folder `ROOT`."""

    file: Path
    start: int
    end: int


def read_table(text: str) -> list[Mutant]:
    """The mutants of a text as mutants.txt."""
    found, tests = [], ()
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("["):
            tests = tuple(line[1:-1].split())
        elif line.startswith("~"):
            found += [Mutant(f"~{key}", "", "", "", tests) for key in line[1:].split()]
        elif not line.startswith("#"):
            code, _, wrong = line.partition("  =>")
            name, *scope, right = re.split(r"\s{2,}", code)
            found.append(Mutant(name, "".join(scope).removeprefix("@"), right, wrong.strip(), tests))
    return found


MUTANTS = read_table(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))


@functools.cache
def modules() -> dict[Path, tuple[str, ast.Module]]:
    """The text and the syntax of each module of the packages."""
    found = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found[path.relative_to(ROOT)] = text, ast.parse(text)
    return found


def scopes(name: str) -> Iterator[Place]:
    """The modules, or the functions, methods and classes, of this name; all modules for ""."""
    for file, (text, tree) in modules().items():
        if not name or file.with_suffix("").as_posix().endswith(f"/{name}"):
            yield Place(file, 0, len(text))
        parents = [("", tree)]
        while name and parents:
            prefix, parent = parents.pop()
            for node in ast.iter_child_nodes(parent):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    if name in (node.name, prefix + node.name):
                        yield Place(file, *_span(text, node))
                    parents.append((f"{prefix}{node.name}.", node))


def place_of(mutant: Mutant) -> Place:
    """What the mutant replaces; ValueError unless it is there exactly once."""
    if mutant.name.startswith("~"):
        (section,) = scopes(_class_of(mutant))
        return Place(section.file, *[len(modules()[section.file][0])] * 2)
    argument, found = ARGUMENT.fullmatch(mutant.right), set()
    # Any white space between words and marks, and a comma before a closing bracket.
    words = re.findall(r"\w+|[^\w\s]", mutant.right)
    pattern = re.compile(r"\s*".join(r",?\s*" * (word in ")]}") + re.escape(word) for word in words))
    for file, start, end in scopes(mutant.scope):
        text, tree = modules()[file]
        if argument is None:
            found |= {Place(file, *match.span()) for match in pattern.finditer(text, start, end)}
            continue
        callee, keyword, number = argument.groups()
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == callee:
                values = [each.value for each in call.keywords if keyword and each.arg == keyword]
                values += call.args[int(number) :][:1] if number else []
                spans = [_span(text, value) for value in values]
                found |= {Place(file, *span) for span in spans if start <= span[0] < end}
    if len(found) != 1:
        where = mutant.scope or "the packages"
        raise ValueError(f"mutant {mutant.name}: {mutant.right!r} occurs {len(found)} times in {where}")
    return found.pop()


def _span(text: str, node: ast.expr | ast.stmt) -> tuple[int, int]:
    lines = text.splitlines(keepends=True)

    def offset(line: int | None, column: int | None) -> int:
        assert line is not None and column is not None
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)


def mutated(mutant: Mutant) -> tuple[Path, str]:
    """The file that the mutant changes, and its text with the mutant in it."""
    file, start, end = place_of(mutant)
    text, wrong = modules()[file][0], mutant.wrong
    if mutant.name.startswith("~"):
        wrong = FORGETS.format(kind=_class_of(mutant), key=mutant.name.rpartition(".")[2])
    return file, text[:start] + wrong + text[end:]


def _class_of(mutant: Mutant) -> str:
    """The class of the section in which a key is."""
    return f"{mutant.name[1:].split('.')[-2].title()}Config"


def run_tests(folder: Path, tests: Iterable[str]) -> subprocess.CompletedProcess[str]:
    """Run these test modules in `folder` up to the first failure."""
    found = {path.stem.removeprefix("test_"): path for path in (ROOT / "tests").rglob("test_*.py")}
    files = [str(found[name].relative_to(ROOT)) for name in tests]
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {"HYPOTHESIS_PROFILE": "ci", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def main() -> int:
    """Run the chosen mutants, say which fell and which survived, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="mutants to run (all)")
    names = parser.parse_args().names
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    broken = {mutant: mutated(mutant) for mutant in chosen}
    survived = []
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy / name)
        healthy = run_tests(copy, dict.fromkeys(name for mutant in chosen for name in mutant.tests))
        if healthy.returncode != 0:
            print(f"the tests are red without any mutant:\n{healthy.stdout}{healthy.stderr}")
            return 1
        for mutant in chosen:
            begin, (file, text) = time.perf_counter(), broken[mutant]
            (copy / file).write_text(text, encoding="utf-8")
            result = run_tests(copy, mutant.tests)
            (copy / file).write_text(modules()[file][0], encoding="utf-8")
            # Status 1 is a failed test; anything else (a mutant that cannot be imported) proves nothing.
            if result.returncode == 1:
                verdict = next((x for x in result.stdout.splitlines() if x.startswith("FAILED")), "FAILED")
            elif result.returncode == 0:
                verdict = "SURVIVED"
            else:
                verdict = f"NOT RUN (pytest status {result.returncode})"
            if result.returncode != 1:
                survived.append(mutant.name)
            print(f"{mutant.name:32} {time.perf_counter() - begin:5.1f} s  {verdict[:110]}", flush=True)
    fell = len(chosen) - len(survived)
    print(f"{fell} of {len(chosen)} mutants fell; survived: {', '.join(survived) or 'none'}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())

"""Breaks the code in one place at a time, and checks that the tests notice: `-m tests.campaigns.mutants`.

mutants.txt has the places. Each mutant replaces one expression or statement in a temporary copy of the
packages, and runs the tests of its section on that copy. Names given on the command line choose mutants, and
`--some 20 --seed 3` draws twenty. Exit status 1: a mutant survived, or a test that noticed one is red
without it.

A line is, with two spaces between its parts: NAME  @SCOPE  CODE  =>  WRONG. CODE is Python, and is compared
with the syntax of SCOPE (a function, a method, a class, a module or a folder), where it must occur once.
Names in CODE that neither the module nor Python defines stand for a variable of any name, so that a renamed
variable breaks no mutant, and names that begin with `_` stand for any expression. As CODE,
`adamw(weight_decay=)` is the value of this argument in the one call of `adamw` that has it, and `adamw(#1)`
that of the second positional argument; WRONG calls that value `_`. A line of "~" and keys of the config
makes a mutant of each: it forgets what the key says.
"""

import argparse
import ast
import builtins
import copy
import functools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("grpo_fn", "runners")
COPIED = (*PACKAGES, "tests", "benchmarks", "configs", "docs", "pyproject.toml", "grpo_entry.py")
# After this the key has its default, whatever is set.
FORGETS = """

_own = {kind}.__init__
{kind}.__init__ = lambda self, **keys: _own(self, **{{name: keys[name] for name in keys if name != "{key}"}})
"""
ARGUMENT = re.compile(r"(\w+)\((?:(\w+)=|#(\d))\)")


class Mutant(NamedTuple):
    """One wrong line."""

    name: str
    scope: str
    right: str
    wrong: str
    tests: tuple[str, ...]  # the names of test modules that have to notice it


class Place(NamedTuple):
    """What a mutant replaces, and what the names of its pattern stand for there."""

    file: Path  # from ROOT
    node: ast.AST
    bound: dict[str, ast.AST]


def read_table(text: str) -> list[Mutant]:
    """The mutants of a text as mutants.txt."""
    found, tests = [], ()
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("["):
            tests = tuple(line[1:-1].split())
        elif line.startswith("~"):
            found += [Mutant(f"~{key}", f"{_class_of(key)}Config", "", "", tests) for key in line[1:].split()]
        elif not line.startswith("#"):
            code, _, wrong = line.partition("  =>")
            name, scope, right = re.split(r"\s{2,}", code)
            found.append(Mutant(name, scope.removeprefix("@"), right, wrong.strip(), tests))
    return found


def _class_of(key: str) -> str:
    return key.split(".")[-2].title()


MUTANTS = read_table(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))


@functools.cache
def modules() -> dict[Path, ast.Module]:
    """The syntax of each module of the packages."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def scopes(name: str, trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, ast.AST]]:
    """The folders, modules, functions, methods or classes of this name."""
    for file, tree in trees.items():
        if f"/{name}/" in f"/{file.with_suffix('').as_posix()}/":
            yield file, tree
            continue
        parents: list[tuple[str, ast.AST]] = [("", tree)]
        while parents:
            prefix, parent = parents.pop()
            for node in ast.iter_child_nodes(parent):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    if name in (node.name, prefix + node.name):
                        yield file, node
                    parents.append((f"{prefix}{node.name}.", node))


def place_of(mutant: Mutant, trees: dict[Path, ast.Module] | None = None) -> Place:
    """What the mutant replaces; ValueError unless it is there exactly once."""
    trees, found = trees or modules(), []
    argument = ARGUMENT.fullmatch(mutant.right)
    for file, scope in scopes(mutant.scope, trees):
        if not mutant.right:
            found.append(Place(file, trees[file], {}))
        elif argument:
            callee, keyword, number = argument.groups()
            for call in ast.walk(scope):
                if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == callee:
                    values = [each.value for each in call.keywords if keyword and each.arg == keyword]
                    values += call.args[int(number) :][:1] if number else []
                    found += [Place(file, value, {"_": value}) for value in values]
        else:
            pattern, known = _parsed(mutant.right), _globals(trees[file])
            for node in ast.walk(scope):
                bound: dict[str, ast.AST] = {}
                if _matches(pattern, node, known, bound):
                    found.append(Place(file, node, bound))
    if len(found) != 1:
        raise ValueError(f"mutant {mutant.name}: {mutant.right!r} is {len(found)} times in {mutant.scope}")
    return found[0]


def _parsed(code: str) -> ast.AST:
    (statement,) = ast.parse(code).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _globals(tree: ast.Module) -> set[str]:
    """The names that a module, or Python, defines."""
    found = set(dir(builtins))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for each in targets for name in ast.walk(each) if isinstance(name, ast.Name)}
    return found


def _bound_inside(tree: ast.AST) -> set[str]:
    """The names that an expression binds itself: in a comprehension, of a lambda."""
    nodes = list(ast.walk(tree))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.arg for node in nodes if isinstance(node, ast.arg)}


def _matches(pattern: Any, node: Any, known: set[str], bound: dict[str, ast.AST]) -> bool:
    """Whether the two are the same but for names of variables, each of which goes into `bound`."""
    if isinstance(pattern, list):
        return (
            isinstance(node, list)
            and len(pattern) == len(node)
            and all(_matches(one, other, known, bound) for one, other in zip(pattern, node, strict=True))
        )
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    if isinstance(pattern, ast.arg) and isinstance(node, ast.arg):
        pattern, node = ast.Name(pattern.arg), ast.Name(node.arg)
    if isinstance(pattern, ast.Name) and pattern.id not in known:
        free = pattern.id.startswith("_") and isinstance(node, ast.expr)
        if not free and not (isinstance(node, ast.Name) and node.id not in known):
            return False
        text = ast.unparse(node)
        return ast.unparse(bound.setdefault(pattern.id, node)) == text and (
            free or all(ast.unparse(other) != text for name, other in bound.items() if name != pattern.id)
        )
    return type(pattern) is type(node) and all(
        _matches(getattr(pattern, field), getattr(node, field), known, bound)
        for field in pattern._fields
        if field not in ("ctx", "type_comment", "kind")
    )


class _Filled(ast.NodeTransformer):
    """A pattern with what its names stand for."""

    def __init__(self, bound: dict[str, ast.AST]) -> None:
        self._bound = bound

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self._bound.get(node.id, node))

    def visit_arg(self, node: ast.arg) -> ast.AST:
        name = self._bound.get(node.arg)
        return ast.arg(name.id) if isinstance(name, ast.Name) else node


def mutated(mutant: Mutant) -> tuple[Path, str]:
    """The file that the mutant changes, and its text with the mutant in it."""
    file, node, bound = place_of(mutant)
    text = (ROOT / file).read_text(encoding="utf-8")
    if not mutant.right:
        return file, text + FORGETS.format(kind=mutant.scope, key=mutant.name.rpartition(".")[2])
    wrong = _parsed(mutant.wrong)
    names = {name.id for name in ast.walk(wrong) if isinstance(name, ast.Name) and name.id not in bound}
    if unbound := names - _globals(modules()[file]) - _bound_inside(wrong):
        raise ValueError(f"mutant {mutant.name}: {', '.join(sorted(unbound))} occurs in WRONG alone")
    wrong = ast.unparse(_Filled(bound).visit(wrong))
    wrong = f"({wrong})" if isinstance(node, ast.expr) else wrong
    lines = text.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    start = offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
    end = offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
    return file, text[:start] + wrong + text[end:]


def run_tests(folder: Path, tests: Iterable[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run these tests, names of modules or of single tests, in `folder`."""
    found = {path.stem.removeprefix("test_"): path for path in (ROOT / "tests").rglob("test_*.py")}
    files = [str(found[name].relative_to(ROOT)) if name in found else name for name in tests]
    options = (*options, "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist")
    environment = {"HYPOTHESIS_PROFILE": "ci", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def hunt(chosen: list[Mutant], report=print) -> list[str]:
    """Run the tests of each mutant, report each, and return those that survived, and tests that are red."""
    wrong, noticed = [], set()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder / name)
        for mutant in chosen:
            begin, (file, text) = time.perf_counter(), mutated(mutant)
            (folder / file).write_text(text, encoding="utf-8")
            result = run_tests(folder, mutant.tests, "-x", "--timeout=300")  # some hang
            shutil.copy(ROOT / file, folder / file)
            failed = re.findall(r"^FAILED (.+?)(?: - .*)?$", result.stdout, re.MULTILINE)
            # Status 1 is a failed test; anything else (a mutant that cannot be imported) proves nothing.
            verdict = {0: "SURVIVED", 1: " ".join(failed)}.get(result.returncode, result.stdout[-300:])
            if result.returncode == 1 and failed:
                noticed.update(failed)
            else:
                wrong.append(mutant.name)
            report(f"{mutant.name:32} {time.perf_counter() - begin:5.1f} s  {verdict}")
        healthy = run_tests(folder, sorted(noticed)) if noticed else None
    if healthy and healthy.returncode:
        wrong.append(f"red without any mutant:\n{healthy.stdout}{healthy.stderr}")
    return wrong


def main() -> int:
    """Run the chosen mutants, print which were caught and which survived, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="mutants to run (all)")
    parser.add_argument("--some", type=int, default=0, help="draw this many of them")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    options = parser.parse_args()
    unknown = set(options.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    if options.some:
        chosen = random.Random(options.seed).sample(chosen, min(options.some, len(chosen)))
    wrong = hunt(chosen, functools.partial(print, flush=True))
    caught = len({mutant.name for mutant in chosen}.difference(wrong))
    print(f"{caught} of {len(chosen)} mutants were caught", *(f"wrong: {each}" for each in wrong), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Breaks the code in one place at a time, and checks that the tests notice: `-m tests.campaigns.mutants`.

mutants.txt has the places. Each mutant replaces one expression or statement in a temporary copy of the
packages, and runs the tests of its section on that copy. Names given on the command line choose mutants, and
`--some 20 --seed 3` draws twenty. Exit status 1: a mutant survived, or a test that noticed one is red
without it.

A line is, with two spaces between its parts: NAME  @SCOPE  CODE  =>  WRONG. CODE is Python and has to occur
once in SCOPE: a function, a method, a class, a module or a folder. As CODE, `adamw(weight_decay=)` is the
value of this argument in the one call of `adamw` that has it, and `adamw(#1)` that of the second positional
argument; WRONG calls that value `_`. A line of "~" and keys of the config makes a mutant of each: it forgets
what the key says.
"""

import ast
import builtins
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
from typing import NamedTuple

import click

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


def read_table(text: str) -> list[Mutant]:
    """The mutants of a text as mutants.txt."""
    found, tests = [], ()
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("["):
            tests = tuple(line[1:-1].split())
        elif line.startswith("~"):
            for key in line[1:].split():
                found.append(Mutant(f"~{key}", f"{key.split('.')[-2].title()}Config", "", "", tests))
        elif not line.startswith("#"):
            code, _, wrong = line.partition("  =>")
            name, scope, right = re.split(r"\s{2,}", code)
            found.append(Mutant(name, scope.removeprefix("@"), right, wrong.strip(), tests))
    return found


MUTANTS = read_table(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))


@functools.cache
def modules() -> dict[Path, ast.Module]:
    """The syntax of each module of the packages."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def scopes(name: str) -> Iterator[tuple[Path, ast.AST]]:
    """The folders, modules, functions, methods or classes of this name."""
    for file, tree in modules().items():
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


def matches(code: str, scope: ast.AST) -> Iterator[ast.AST]:
    """What CODE stands for in a scope."""
    if not code:
        yield scope
    elif argument := ARGUMENT.fullmatch(code):
        callee, keyword, number = argument.groups()
        for call in ast.walk(scope):
            if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == callee:
                yield from (each.value for each in call.keywords if keyword and each.arg == keyword)
                yield from call.args[int(number) :][:1] if number else ()
    else:
        (pattern,) = ast.parse(code).body
        pattern = pattern.value if isinstance(pattern, ast.Expr) else pattern
        dump = ast.dump(pattern)
        yield from (n for n in ast.walk(scope) if type(n) is type(pattern) and ast.dump(n) == dump)


def mutated(mutant: Mutant) -> tuple[Path, str]:
    """The file that the mutant changes, and its text with the mutant in it; ValueError if it is not there."""
    found = [(file, node) for file, scope in scopes(mutant.scope) for node in matches(mutant.right, scope)]
    if len(found) != 1:
        raise ValueError(f"mutant {mutant.name}: {mutant.right!r} is {len(found)} times in {mutant.scope}")
    ((file, node),) = found
    text = (ROOT / file).read_text(encoding="utf-8")
    if not mutant.right:
        return file, text + FORGETS.format(kind=mutant.scope, key=mutant.name.rpartition(".")[2])
    known = {*dir(builtins), "_", *re.findall(r"\w+", text + mutant.right)}
    if unknown := {n.id for n in ast.walk(ast.parse(mutant.wrong)) if isinstance(n, ast.Name)} - known:
        raise ValueError(f"mutant {mutant.name}: {', '.join(sorted(unknown))} occurs in WRONG alone")
    wrong = mutant.wrong
    if isinstance(node, ast.expr):
        wrong = "(" + re.sub(r"\b_\b", lambda _: f"({ast.unparse(node)})", wrong) + ")"
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


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([mutant.name for mutant in MUTANTS]))
@click.option("--some", default=0, help="Draw this many of them.")
@click.option("--seed", default=0, show_default=True, help="Of the draw.")
def main(names: tuple[str, ...], some: int, seed: int) -> None:
    """Run mutants, all without NAMES, and print which were caught and which survived."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    if some:
        chosen = random.Random(seed).sample(chosen, min(some, len(chosen)))
    wrong = hunt(chosen, functools.partial(print, flush=True))
    caught = len({mutant.name for mutant in chosen}.difference(wrong))
    print(f"{caught} of {len(chosen)} mutants were caught", *(f"wrong: {each}" for each in wrong), sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

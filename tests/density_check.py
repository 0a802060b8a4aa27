"""`python -m tests.density_check`: limits of style that ruff does not know, in the core and the shell."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

TABLES = ("runners/config/sections.py", "runners/metrics.py")  # their lines may be long
TUPLE, WALRUS, LONG = "tuple assignment of unrelated values", "walrus", "line over 100 columns"
SHARES = {TUPLE: 0.3, WALRUS: 0.3, LONG: 0.5}  # allowed for 100 statements or lines; all else: none
# May be called with `**name`: names that are computed, what a file or a message held, functions of users.
FORWARDING = {
    *("evolve", "cls", "having", "preset", "quantize", "reset", "function"),
    *("Config", "PromptSettings", "Rollout", "Experience", "FinishedEpisode"),
}
LOOPS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SIMPLE = {ast.Name, ast.Attribute, ast.Subscript}  # a tuple of one of these is a swap or belongs together


def faults(tree: ast.Module, ours: set[str]) -> Iterator[tuple[int, str]]:
    """The line and kind of each; `ours` are the names of all functions and classes."""
    received = {n.kwarg.arg for n in ast.walk(tree) if isinstance(n, ast.arguments) and n.kwarg}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple(elts=values)):
                kinds = {type(value) for value in values}
                if len(kinds) > 1 or not kinds <= SIMPLE:
                    yield node.lineno, TUPLE
            case ast.NamedExpr():
                yield node.lineno, WALRUS
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                dicts = [k.value for k in node.keywords if k.arg is None]
                built = {value.id for value in dicts if isinstance(value, ast.Name)} - received
                if built and name in ours - FORWARDING:
                    yield node.lineno, "dict of arguments for a function of our own"
            case ast.IfExp():
                if any(isinstance(part, ast.IfExp) for part in list(ast.walk(node))[1:]):
                    yield node.lineno, "conditional expression in another one"
        if isinstance(node, LOOPS) and len(node.generators) > 1:
            yield node.lineno, "comprehension with more than one loop"


def main(packages: tuple[str, ...] = ("grpo_fn", "runners")) -> bool:
    """Print what is over the limits; returns whether anything is."""
    texts = {path: path.read_text() for name in packages for path in sorted(Path(name).rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes = {path: list(ast.walk(tree)) for path, tree in trees.items()}
    defined = (ast.FunctionDef, ast.ClassDef)
    ours = {n.name for each in nodes.values() for n in each if isinstance(n, defined)}
    failed = False
    for package in packages:
        found: dict[str, list[str]] = {}
        sizes = {"statements": 0, LONG: 0}
        for path in (path for path in trees if path.parts[0] == package):
            rows = [] if path.as_posix() in TABLES else texts[path].splitlines()
            places = [(n, LONG) for n, row in enumerate(rows, 1) if len(row) > 100]
            for line, kind in [*faults(trees[path], ours), *places]:
                found.setdefault(kind, []).append(f"{path}:{line}: {kind}")
            docs = (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) for n in nodes[path])
            sizes["statements"] += sum(isinstance(n, ast.stmt) for n in nodes[path]) - sum(docs)
            sizes[LONG] += len(rows)
        for kind, lines in found.items():
            most = SHARES.get(kind, 0.0) * sizes.get(kind, sizes["statements"]) / 100
            if len(lines) > most:
                failed = True
                print(*lines, f"{package}: {len(lines)} × {kind}, at most {most:.0f}", sep="\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())

"""What `import grpo_fn` offers."""

import ast
from pathlib import Path

import grpo_fn as g

TREE = ast.parse(Path(g.__file__).read_text(encoding="utf-8"))


def test_the_names_are_plain_imports():
    """`__all__` has each name once, and they are those that the module imports from its own modules."""
    imported = [
        alias.name
        for node in TREE.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("grpo_fn.")
        for alias in node.names
    ]
    assert sorted(imported) == sorted(g.__all__) and len(set(g.__all__)) == len(g.__all__)
    assert all(hasattr(g, name) for name in g.__all__)

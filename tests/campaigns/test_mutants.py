"""One-line changes of the code are noticed, some of them; `python -m tests.campaigns.mutants` tries all."""

import ast
import copy
import random

import pytest

from tests.campaigns.mutants import MUTANTS, ROOT, hunt, modules, mutated, place_of, read_table

MODULES = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}


def test_fifteen_mutants_are_caught():
    """Drawn with a fixed seed, but for those of images, whose tests need mlx-vlm, and one that survives."""
    lines: list[str] = []
    survives = "~rollout.storage"  # known: nothing that a run on a CPU leaves tells which storage it had
    found = [each for each in MUTANTS if "vision_runs" not in each.tests and each.name != survives]
    assert hunt(random.Random(0).sample(found, 15), lines.append) == [], "\n".join(lines)


def renamed(tree: ast.Module) -> ast.Module:
    """The module with another name for each variable of its functions."""
    tree = copy.deepcopy(tree)
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]:
        nodes = list(ast.walk(function))
        stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own = stored | {node.arg for node in nodes if isinstance(node, ast.arg)}
        for node in nodes:
            if isinstance(node, ast.Name) and node.id in own and not node.id.endswith("_renamed"):
                node.id += "_renamed"
            elif isinstance(node, ast.arg) and not node.arg.endswith("_renamed"):
                node.arg += "_renamed"
    return tree


def test_each_mutant_applies_also_where_variables_are_renamed():
    """Its code is there exactly once, and what it makes of the file is different and valid Python."""
    others = {file: renamed(tree) for file, tree in modules().items()}
    for mutant in MUTANTS:
        file, broken = mutated(mutant)
        assert broken != (ROOT / file).read_text(encoding="utf-8") and compile(broken, str(file), "exec")
        assert mutant.tests and all(x in MODULES or (ROOT / x).is_file() for x in mutant.tests), mutant.name
        found = [place_of(mutant, trees) for trees in (modules(), others)]
        assert len({(at.file, getattr(at.node, "lineno", 0)) for at in found}) == 1, mutant.name
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("@training  nothing ** this  =>  0", "is 0 times in training"),
        ("@k1  return -y  =>  return z", "z occurs in WRONG alone"),
    ],
)
def test_a_mutant_that_no_longer_applies_is_named(code, complaint):
    """It is not passed over."""
    (mutant,) = read_table(f"gone  {code}")
    with pytest.raises(ValueError, match=f"mutant gone: .*{complaint}"):
        mutated(mutant)

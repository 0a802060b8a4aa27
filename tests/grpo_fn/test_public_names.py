"""What `import grpo_fn` offers, and how little it loads."""

import ast
import importlib
from pathlib import Path

import pytest

import grpo_fn as g
from tests.support.processes.new_process import in_new_process

TREE = ast.parse(Path(g.__file__).read_text(encoding="utf-8"))
LOADED = "import sys; print(*[name for name in sys.modules if name.startswith(('grpo_fn', 'mlx'))])"


def seen_by_type_checkers():
    """Name → module, from the imports that type checkers see."""
    (block,) = [
        node for node in TREE.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_type_checkers_see_the_names_that_are_offered():
    """`__all__` and the imports for type checkers have the same names."""
    assert sorted(seen_by_type_checkers()) == sorted(g.__all__)
    assert len(set(g.__all__)) == len(g.__all__)


@pytest.mark.parametrize("name", g.__all__)
def test_each_name_is_what_type_checkers_take_it_for(name):
    """The object at run time is the one of the module that is named for type checkers."""
    home = importlib.import_module(seen_by_type_checkers()[name])
    assert getattr(g, name) is getattr(home, name)
    assert name in dir(g)


def test_a_name_that_is_not_there_is_an_error():
    """Also one that a module of the package imports for itself."""
    for name in ("losses", "mx", "annotations"):
        with pytest.raises(AttributeError, match=f"module 'grpo_fn' has no attribute '{name}'"):
            getattr(g, name)
    with pytest.raises(ImportError, match="cannot import name 'losses'"):
        exec("from grpo_fn import losses")


def test_the_core_alone_imports_no_mlx():
    """`import grpo_fn` loads a BLAS before MLX, hence no MLX; it has its version and its names."""
    names = in_new_process(f"import grpo_fn; grpo_fn.__version__, dir(grpo_fn); {LOADED}").split()
    assert [name for name in names if name.startswith("mlx")] == []


@pytest.mark.parametrize(
    "code",
    ["import grpo_fn.algorithm", "from grpo_fn import policy_loss", "import grpo_fn; grpo_fn.algorithm"],
)
def test_the_algorithm_loads_no_model_and_no_backend(code):
    """Beside its own modules and the root helpers there is nothing but the BLAS."""
    names = {name for name in in_new_process(f"{code}; {LOADED}").split() if name.startswith("grpo_fn.")}
    folders = {name.split(".")[1] for name in names}
    assert "grpo_fn.algorithm.loss" in names
    assert folders & {"policy", "learner", "rollout"} == set()
    backends = {name for name in names if name.startswith("grpo_fn.backends")}
    assert backends <= {"grpo_fn.backends", "grpo_fn.backends.cpu", "grpo_fn.backends.cpu.blas"}

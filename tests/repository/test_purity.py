"""What the core may import and call: nothing that reads a file, a clock, the environment or a global RNG."""

import ast
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "grpo_fn"
FILES = sorted(CORE.rglob("*.py"))
# Everything else is refused, so that a new import is a decision.
ALLOWED = {
    "__future__", "bisect", "collections", "contextlib", "copy", "difflib", "fractions", "functools",
    "itertools", "math", "operator", "re", "types", "typing", "zlib", "attrs", "grpo_fn", "mlx", "mlx_lm",
}  # fmt: skip
# Loading the BLAS is the one effect of importing the core, and what it needs is in this file alone. CUDA
# kernels call the compiler that MLX has loaded, and a process asks for its own number. Compiling without
# fusion is a function of MLX's library that it does not offer to Python.
EFFECTS = {
    "compile.py": {"ctypes"},
    "backends/__init__.py": {"importlib"},  # one of its folders may have been deleted
    "process_check.py": {"os"},
    "backends/mechanisms.py": {"importlib"},  # imports the submodules of a backend when they are asked for
    "backends/cuda/kernels.py": {"ctypes"},
    "backends/cpu/blas.py": {"ctypes", "glob", "importlib", "os", "pathlib", "sys", "warnings"},
}  # fmt: skip
KEYED = {
    "bernoulli", "bits", "categorical", "gumbel", "laplace", "multivariate_normal", "normal", "permutation",
    "randint", "truncated_normal", "uniform",
}  # fmt: skip
EXPLICIT = {"key", "split"}  # they take or make a key, and read no global one


def parsed(file):
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def imports(tree):
    """The top-level names of every import, at whatever depth it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield (node.module or "").split(".")[0]


def random_calls(tree):
    """(name, call) of every use of mx.random; (name, None) where it is not called on the spot."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("mx.random", "random"):
            yield node.attr, calls.get(id(node))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_has_no_effect(file):
    """No import, call or `global` with an effect, and mx.random only with key=."""
    tree = parsed(file)
    assert set(imports(tree)) <= ALLOWED | EFFECTS.get(file.relative_to(CORE).as_posix(), set())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"print", "open", "input", "exec", "eval", "mx.load", "mx.save", "mx.random.seed"}
    called.discard("mx.metal.is_available")  # which device computes is known all along, as by default_device
    assert not {name for name in called if name.startswith(("mx.set_", "mx.save_", "mx.metal."))}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for name, call in random_calls(tree):
        if name not in EXPLICIT:
            assert name in KEYED, f"mx.random.{name}"
            keywords = {} if call is None else {k.arg: ast.unparse(k.value) for k in call.keywords}
            assert keywords.get("key", "None") != "None", f"mx.random.{name} without key="


BY_DEVICE = {"default_device", "is_available", "has_cuda", "backend", "DeviceType"}


@pytest.mark.parametrize(
    "file", [file for file in FILES if "backends" not in file.parts], ids=lambda file: file.name
)
def test_only_the_backends_ask_for_the_device(file):
    """Others ask `find`, `number` or `enabled` for what they want."""
    nodes = [*ast.walk(parsed(file))]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not names & BY_DEVICE

"""What import-linter cannot check: what an import loads, and which names the shell takes from the core."""

import ast
import functools
import json
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

from tests.support.processes.new_process import in_new_process

ROOT = Path(__file__).resolve().parents[2]
SHELL = sorted((ROOT / "runners").rglob("*.py"))
LIGHT = {"errors", "cli", "commands", "config", "machine", "files"}


def module_of(file: Path) -> str:
    """A file's dotted name."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_module_imports_itself_in_a_circle():
    """Not even for types."""
    graph = grimp.build_graph("grpo_fn", "runners", cache_dir=None, exclude_type_checking_imports=False)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200
    TopologicalSorter(imports).prepare()  # raises CycleError


def test_light_folders_load_no_mlx():
    """Importing all of config, machine, files and the commands leaves MLX and the core alone."""
    modules = [module for module in map(module_of, SHELL) if {*module.split(".")[1:2]} & LIGHT]
    assert {"runners.config.loading", "runners.machine.startup", "runners.files.durable"} <= {*modules}
    code = (
        f"import importlib, json, sys; [importlib.import_module(name) for name in {modules!r}];"
        "print(json.dumps(sorted({'mlx', 'mlx_lm', 'grpo_fn', 'transformers'} & set(sys.modules))))"
    )
    assert json.loads(in_new_process(code)) == []


def test_the_http_server_is_imported_where_it_is_wanted():
    """The packages of the extra serve are not everywhere: nothing of the shell needs them to be imported."""
    wanted = {"runners.serve.app", "runners.serve.tinker.app", "runners.serve.tinker.wire"}
    modules = [module for module in map(module_of, SHELL) if module not in wanted]
    code = (
        "import importlib, sys; sys.modules |= {'starlette': None, 'uvicorn': None, 'tinker': None};"
        f"[importlib.import_module(name) for name in {modules!r}]"
    )
    in_new_process(code)


@functools.cache
def offered_names(folder: Path) -> set[str]:
    """The names that a folder's __init__ imports; of a file: none."""
    file = folder / "__init__.py"
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if file.exists() else ()
    return {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def deeper_imports(file: Path) -> list[str]:
    """The imports of a file that reach into a folder of the core, past what its __init__ offers."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("grpo_fn."):
            continue
        place = ROOT.joinpath(*str(node.module).split("."))
        names = [alias.name for alias in node.names if alias.name not in offered_names(place)]
        inner = [name for name in names if (place / f"{name}.py").exists()]
        is_helper = place.parent.name == "grpo_fn" and not place.is_dir()
        if inner or not (place.is_dir() or is_helper):
            found.append(f"{file.relative_to(ROOT)}:{node.lineno}: {node.module}")
    return found


def test_the_shell_takes_what_the_cores_folders_offer():
    """Names come from grpo_fn, from its helpers, or from a folder's __init__: nothing deeper."""
    assert [line for file in SHELL for line in deeper_imports(file)] == []

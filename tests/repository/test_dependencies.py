"""Dependencies: imports are declared, declarations are pinned."""

import ast
import functools
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.processes.new_process import python

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OURS = {"grpo_entry", "grpo_fn", "runners", "configs", "benchmarks", "tests"}
NAMES = {
    "PIL": "pillow",
    "google": "protobuf",
    "markdown_it": "markdown-it-py",
}  # a module whose distribution has another name
NEEDED_BY_OTHERS = {"jinja2", "mlx-vlm"}  # for chat templates; runners.images imports it by name
FOR_USERS = ("gguf", "math", "tasks", "vlm", "torch", "dashboards", "serve", "tinker")
TOOLS = {"pytest-timeout", "pytest-xdist", "ruff", "pyright", "import-linter", "openai"}  # run, not imported


def declared(*extras):
    """The requirements of the package, or of these extras, by their canonical names."""
    lines = [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    requirements = [Requirement(line) for line in (lines if extras else PROJECT["dependencies"])]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


@functools.cache
def imports_of(folder):
    """(file's name, distribution, whether it is outside of functions) of all that a folder's files import."""
    found = set()
    for file in sorted((ROOT / folder).rglob("*.py")):
        if file.parent.name == "clients":  # programs for environments of their own
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        outside = set(ast.iter_child_nodes(tree))
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "import_extra"
            ):
                modules = [ast.unparse(node.args[0]).removeprefix("f").strip("'")]
            for module in modules:
                name = module.split(".")[0]
                if name not in OURS | sys.stdlib_module_names:
                    found.add((file.name, canonicalize_name(NAMES.get(name, name)), node in outside))
    return found


def imported(*folders, at_top=False):
    """The distributions that these folders' files import, as keys; `at_top`: outside of functions alone."""
    found = {each for folder in folders for each in imports_of(folder)}
    return {name: file for file, name, outside in sorted(found) if outside or not at_top}


@pytest.mark.parametrize(
    ("folders", "extras", "at_top"),
    [
        # runners/serve/app.py and tinker/ are imported inside functions alone: test_import_rules.py
        (("grpo_fn", "runners", "configs"), ("serve", "tinker"), True),
        (("grpo_fn", "runners", "configs"), FOR_USERS, False),
        (("benchmarks",), (*FOR_USERS, "bench", "peers", "browser"), False),
        (("tests",), (*FOR_USERS, "dev", "peers"), False),
    ],
)
def test_what_is_imported_is_declared(folders, extras, at_top):
    """Every import names a distribution of pyproject.toml: outside of functions, one that is always there."""
    known = {*declared(), *(declared(*extras) if extras else ())}
    missing = {name: file for name, file in imported(*folders, at_top=at_top).items() if name not in known}
    assert missing == {}


def test_what_is_declared_is_imported():
    """No declared dependency is unused."""
    used = {*imported("grpo_fn", "runners")} | NEEDED_BY_OTHERS
    assert {*declared(), *declared(*FOR_USERS)} - used == set()
    assert {*declared("dev")} - {*imported("tests", "benchmarks", "runners")} - TOOLS == set()


def test_constraints_pin_every_dependency_within_its_bounds():
    """constraints.txt has one exact version of each, and nothing that exists on one platform alone."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {}
    for line in lines:
        if not line.startswith("#"):
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line), line
            name, _, version = line.partition("==")
            pins[canonicalize_name(name)] = version
    wanted = declared() | declared(*FOR_USERS, "dev", "bench", "docs", "peers")
    assert [
        name
        for name, requirement in wanted.items()
        if name not in pins or not requirement.specifier.contains(pins[name])
    ] == []
    alone = re.compile(r"mlx-(cpu|cuda|metal)|nvidia-|cuda-|triton|setuptools|pip$")
    assert [name for name in pins if alone.match(name)] == []


def test_what_make_asks_python_at_set_up_is_answered():
    """With exit code 0 or 1; an error would look like a missing BLAS."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    programs = re.findall(r"\$\(BIN\)/python -c '(.*?)'", text)
    assert len(programs) == 2 and any("BLAS" in program for program in programs)
    for program in programs:
        done = python("-c", program, code=None)
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr

"""The pages tell the truth: their tables against the code, their links, and every snippet that they show."""

import ast
import re
import shlex
import tomllib

import click
import httpx2
import pytest

import grpo_fn as g
from benchmarks.architectures.small_models import modules
from runners import cli
from runners.config.loading import KEYS, SECTIONS, load_config
from runners.rewards.scoring import resolve_rewards
from tests.support.commands import grpo
from tests.support.pages import PAGES, ROOT, anchors, codes, links, prose, snippets, tables
from tests.support.processes.new_process import in_new_process
from tests.support.resuming import lines_of

DOCS = ROOT / "docs"
SNIPPETS = [snippet for page in PAGES for snippet in snippets(page)]


def named(language, *, run=False):
    """The snippets of a language; with `run`, those to be run."""
    chosen = [s for s in SNIPPETS if s.language == language and (not run or "run" in s.comments)]
    return pytest.mark.parametrize("snippet", chosen, ids=lambda snippet: snippet.id)


def run_commands(text, **more):
    """The `grpo` lines of a block of shell commands, `more` words behind those of each command."""
    for line in text.strip().splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "grpo", line
        grpo(*words, *more.get(words[0], ()))


@pytest.fixture
def folder(tmp_path, monkeypatch, request):
    """The current folder: empty but for the files that the snippet's page makes, shows or says it needs."""
    snippet = request.getfixturevalue("snippet")
    monkeypatch.chdir(tmp_path)
    if "run" in snippet.comments:
        for other in snippets(snippet.page):
            if "first" in other.comments:
                run_commands(other.text)
    for other in snippets(snippet.page):
        if "file" in other.comments:
            (tmp_path / other.comments["file"]).write_text(other.text, encoding="utf-8")
    for name in snippet.comments.get("needs", "").split():
        path = tmp_path / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    return tmp_path


@named("toml")
def test_a_toml_snippet_is_a_config(snippet, folder, monkeypatch):
    """It loads, its loss has a meaning, and its rewards exist; a part of a config gets a model and data."""
    monkeypatch.setattr("httpx2.get", lambda *_, **__: httpx2.Response(200))  # judges' servers
    table = tomllib.loads(snippet.text)
    overrides = ["model.path=embedded"] if "path" not in table.get("model", {}) else []
    overrides += ["data.source=embedded"] if "source" not in table.get("data", {}) else []
    (folder / "snippet.toml").write_text(snippet.text, encoding="utf-8")
    config = load_config("snippet.toml", overrides).check()
    rewards = resolve_rewards(config.reward.functions, config.reward.weights, [folder])
    assert len(rewards) == len(config.reward.functions)


@named("python")
def test_a_python_snippet_is_python_and_imports_the_core_before_mlx(snippet):
    """Where it imports both: the BLAS of a Linux CPU has to be loaded first."""
    ast.parse(snippet.text, filename=snippet.id)
    found = re.findall(r"^\s*(?:import|from) (grpo_fn|runners|mlx\w*)\b", snippet.text, re.MULTILINE)
    if any(name.startswith("mlx") for name in found) and {"grpo_fn", "runners"} & {*found}:
        assert found[0] == "grpo_fn"


@named("python", run=True)
def test_a_python_snippet_runs(snippet, folder):
    """What is marked to be run ends without an error; what is marked to learn prints rewards that rise."""
    printed = in_new_process(snippet.text, cwd=folder)
    if "learns" in snippet.comments:
        found = re.findall(r"reward (\S+)  \|gradient\| (\S+)", printed)
        rewards, gradients = (list(map(float, column)) for column in zip(*found, strict=True))
        assert all(value > 0 for value in [*rewards, *gradients]), printed
        assert sum(rewards[-2:]) > sum(rewards[:2]), printed


@named("sh", run=True)
def test_shell_commands_run(snippet, folder):
    """One after the other, each without an error."""
    run_commands(snippet.text)


def test_the_student_of_the_page_approaches_its_teacher(tmp_path, monkeypatch):
    """The config and the three commands, shortened; the KL falls in the first updates already."""
    monkeypatch.chdir(tmp_path)
    found = [*snippets(DOCS / "cold-start.md")]
    first = [snippet.comments.get("file") for snippet in found].index("teacher.toml")
    toml, commands = found[first : first + 2]
    (tmp_path / toml.comments["file"]).write_text(toml.text)
    settings = ("optim.max_steps=8", "eval.samples=2", "eval.at_start=false")
    run_commands(commands.text, run=[word for setting in settings for word in ("--set", setting)])
    lines = lines_of(tmp_path / "outputs/distilled/training_log.jsonl")
    kl = [line["teacher/kl"] for line in lines if "loss" in line]
    assert len(kl) == 8 and sum(kl[-3:]) < sum(kl[:3])


COMMANDS = [
    (f"{snippet.page.name}: {line}", line)
    for snippet in SNIPPETS
    if snippet.language == "sh"
    for line in snippet.text.splitlines()
    if re.match(r"(\S*/)?grpo(-run)? ", line)
]


@pytest.mark.parametrize("line", [line for _, line in COMMANDS], ids=[name for name, _ in COMMANDS])
def test_a_command_of_the_pages_has_these_options(line):
    """Each `grpo` line is parsed as far as its command and options."""
    program, *words = shlex.split(line, comments=True)
    name, *arguments = ["run", *words] if program.endswith("-run") else words
    with click.Context(cli.main) as group:
        command = cli.main.get_command(group, name)
        assert command is not None, f"grpo has no command {name}"
        command.make_context(name, arguments, parent=group)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Each relative link names a file of the project and, where it says so, a heading of it."""
    for target in links(page):
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists() and found.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_keys_exist(page):
    """`section.key` in a text, or in a table's later columns, is a key or a table of the config."""
    known = {".".join(path[:length]) for path in KEYS for length in range(1, len(path) + 1)}
    pattern = re.compile(rf"({'|'.join(SECTIONS)})\.[a-z_]+(\.[a-z_]+)?")
    texts = [line for line in prose(page) if not line.startswith("|")]
    texts += [cell for table in tables(page) for row in table.rows for cell in row[1:]]
    keys = [code for text in texts for code in codes(text) if pattern.fullmatch(code)]
    assert [key for key in keys if key not in known and not key.endswith(".safetensors")] == []


def test_the_presets_are_as_the_page_says():
    """The table of docs/algorithms.md is PRESETS; a dash stands where a surrogate has no such ε."""
    table = next(t for t in tables(DOCS / "algorithms.md") if t.header[0] == "preset")
    assert [codes(row[0])[0] for row in table.rows] == list(g.PRESETS)
    for recipe, (name, level, surrogate, low, high, *rest) in zip(
        g.PRESETS.values(), table.rows, strict=True
    ):
        spec = recipe.spec
        assert (level, surrogate) == (spec.level, spec.surrogate)
        assert rest == [spec.aggregation, recipe.baseline, recipe.scale]
        assert low == "–" if surrogate in ("cispo", "sapo", "none") else float(low) == spec.epsilon_low
        assert high == "–" if surrogate in ("sapo", "none") else float(high) == spec.upper_epsilon
        assert (recipe.dynamic_sampling, recipe.overlong) == (
            (True, 0.2) if codes(name) == ["dapo"] else (False, 0)
        )
        assert (spec.beta, spec.correction) == (0, "none")


def test_docs_models_has_a_row_for_every_module_of_mlx_lm():
    """None is missing, none is there that mlx-lm does not have. Tables of GPUs have the rows that differ."""
    for backend, table in re.findall(
        r"<!-- table of (\w+) -->(.*?)<!-- end of table -->", (DOCS / "models.md").read_text(), re.DOTALL
    ):
        rows = re.findall(r"^\| `([^`]+)` \| \w+ \|", table, re.MULTILINE)
        assert rows == modules() if backend == "cpu" else set(rows) <= {*modules()}

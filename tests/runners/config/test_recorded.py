"""Untrusted run folders: only known keys with valid values are used, and no code of theirs runs."""

import json
import os

import pytest

from runners.config.loading import read_recorded, run_of
from runners.errors import UserError
from runners.files.json_files import read_json
from tests.support.commands import grpo
from tests.support.tiny_models import make_model_folder

EVIL = """
open({canary!r}, "w").close()
def tool(x: int) -> int:
    '''Doubles.

    Args:
        x: A number.
    '''
    return 2 * x
"""


@pytest.fixture(name="run")
def _run(tmp_path, monkeypatch):
    """A run's folder with a model, and a Python file that creates `ran` when it is imported."""
    monkeypatch.chdir(tmp_path)
    make_model_folder(tmp_path / "run/final", layers=1)
    (tmp_path / "run/evil.py").write_text(EVIL.format(canary=str(tmp_path / "ran")))
    return tmp_path / "run"


def near_misses(file):
    """JSON texts whose keys or values are nearly right; `file` is the Python file."""
    tools, function = json.dumps([str(file)]), json.dumps(f"{file}:tool")
    escaped = tools.replace('"', '\\"')
    for key in ("tools ", "Tools", "env.tools", "tools\\u0000", '\\"tools\\"'):
        yield f'{{"env": {{"{key}": {tools}}}}}'
    yield f'{{"env": {{"ｆactory": {function}}}}}'
    yield f'{{"env": {{"tools={escaped} #": 1}}}}'
    yield f'{{"env": {{"max_turns=1\\ntools={escaped} #": 1}}}}'
    yield f'{{"env ": {{"tools": {tools}}}, "env.tools": {tools}, "--set": "env.tools={escaped}"}}'
    yield f'{{"env": {{"tools": []}}, "env": {{"tools": {tools}}}}}'
    yield f'{{"env": {{"tools": {{"0": {tools}}}, "factory": [{function}]}}}}'
    yield f'{{"env": [{{"tools": {tools}}}], "reward": {{"functions ": [{function}]}}}}'
    yield f'{{"model": {{"loader ": {function}, "path": "embedded", "trust_remote_code": 1}}}}'
    yield '{"env": {"max_turns": NaN, "timeout": Infinity, "workers": 1' + "0" * 400 + "}}"
    yield '{"env": ' + "[" * 300 + "]" * 300 + "}"
    yield '{"env": {"max_turns": "8", "max_tool_calls": true, "on_error": "run", "schedule": null}}'


@pytest.mark.parametrize(
    "command", ["generate run hi --max-tokens 1", "export run --out exported --force", "runs ."]
)
def test_nearly_right_keys_run_nothing(run, tmp_path, command):
    """No code runs, and there is no traceback."""
    for content in near_misses(run / "evil.py"):
        (run / "config.resolved.json").write_text(content)
        grpo(*command.split(), code=None)
        assert not (tmp_path / "ran").exists(), content


def test_known_keys_with_valid_values_are_used(run):
    """The values have JSON's types; all other entries are ignored."""
    file = run / "config.resolved.json"
    file.write_text('{"env": {"max_turns": 3, "workers": 0, "x\\n": 1}, "y": 2, "data": {"nudge": "N"}}')
    assert read_recorded(file) == {"env": {"max_turns": 3}, "data": {"nudge": "N"}}


def test_a_link_and_a_pipe_are_not_read(run, tmp_path):
    """The file must be in the run's folder itself; opening a pipe would block."""
    file, secret = run / "config.resolved.json", tmp_path / "secret.json"
    secret.write_text("{}")
    file.symlink_to(secret)
    for _ in range(2):
        with pytest.raises(UserError, match=r"config\.resolved\.json: cannot be read"):
            read_recorded(file)
        file.unlink()
        os.mkfifo(file)
    with pytest.raises(UserError, match=r"cannot be read as JSON: .*not a regular file"):
        read_json(file)  # as grpo_prompt.json, manifests and models' files are


def test_a_link_to_a_model_of_a_run_belongs_to_that_run(run, tmp_path):
    """The run is found through a link to the model's folder."""
    (run / "config.resolved.json").write_text("{}")
    (tmp_path / "link").symlink_to(run / "final")
    assert run_of("link") == run_of("run/final") == run.resolve() / "config.resolved.json"

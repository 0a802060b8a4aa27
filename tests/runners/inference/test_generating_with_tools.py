"""`grpo generate` with tools runs, answers and limits calls, as in training."""

import json

import pytest
from click.testing import CliRunner

from runners import cli
from runners.environments.tool_calls import CallReader, ToolCall

TOOLS = '''
import time


def double(a: int) -> int:
    """
    Twice a number.

    Args:
        a: The number.
    """
    return 2 * a


def hang() -> str:
    """Never ends."""
    time.sleep(6000)


def _hidden():
    """No tool."""


class Box:
    """Counts."""

    def reset(self, size: int = 3):
        """Begin."""
        self.size, self.open = size, 0
        return f" The box has {size} parts."

    def look(self) -> str:
        """Look inside."""
        self.open += 1
        return f"{self.size} parts"

    def get_reward(self) -> float:
        """How often it was opened."""
        return float(self.open)
'''


@pytest.fixture
def generate(tmp_path, monkeypatch):
    """Runs `grpo generate embedded …` next to tools.py; `calls` are the calls of each turn."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)

    def run(*arguments, calls=()):
        turns = iter(calls)
        asked = lambda self, text: ("said", [ToolCall(*each) for each in next(turns, ())])  # noqa: E731
        monkeypatch.setattr(CallReader, "read", asked)
        options = ["--max-tokens", "400", *(f"--stop={letter}" for letter in "e=15\n")]
        return CliRunner().invoke(cli.main, ["generate", "embedded", *map(str, arguments), *options])

    return run


def told(result):
    """The contents of a row's messages."""
    assert result.exit_code == 0, result.output
    return [each["content"] for each in json.loads(result.stdout)["messages"]]


def test_a_model_s_calls_are_run_and_answered(generate):
    """The row contains turns, replies and counts; only public functions of a file are tools."""
    result = generate("Twice 21?", "--tools", "tools.py", calls=[[("double", {"a": 21})], [("_hidden", {})]])
    assert told(result) == ["said", "42", "said", "{'error': 'there is no tool _hidden'}", "said"]
    row = json.loads(result.stdout)
    assert (row["prompt"], row["finish"], row["completion"]) == ("Twice 21?", "stop", "said")
    assert (row["turns"], row["calls"], row["failures"]) == (3, 2, 1)
    one = generate("?", "--tools", "tools.py:double", calls=[[("hang", {})]])
    assert told(one)[1] == "{'error': 'there is no tool hang'}"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--tools", "nope.py"], "no file at"),
        (["--tools", "tools.py:doble"], "has no doble; did you mean double?"),
        (["--tools", "tools.py", "--tools", "tools.py:double"], "there is already a tool double"),
        (["--tools", "tools.py", "--row", '{"a": 1}'], "--row requires --env FILE:CLASS"),
        (["--env", "tools.py:Box", "--row", "[1]"], "expected a JSON object"),
        (["--env", "tools.py:Box", "--row", "{"], "cannot be read as JSON"),
    ],
)
def test_invalid_options_are_refused(generate, arguments, line):
    """Missing and repeated names, and rows without an environment, are errors."""
    refused = generate("?", *arguments)
    assert refused.exit_code == 2 and line in refused.stderr


def test_the_limits_of_a_config_apply(generate, tmp_path):
    """The limits of --config apply to --tools; without --tools, the config's tools are used."""
    keys = 'max_turns = 2\nmax_tool_calls = 1\ntimeout = 1\ntools = ["tools.py:hang"]'
    (tmp_path / "bounds.toml").write_text(f'model.path = "embedded"\n[env]\n{keys}\n')
    config, double = ["--config", "bounds.toml"], ("double", {"a": 1})
    result = generate("?", *config, "--tools", "tools.py", calls=[[double, double], [double]])
    assert json.loads(result.stdout)["turns"] == 2 and "at most" in told(result)[2]
    assert "timed out after 1 s" in told(generate("?", *config, calls=[[("hang", {})]]))[1]


def test_an_environment_answers_and_rewards(generate):
    """`reset` receives --row, its result is added to the message, and the row contains the reward."""
    box = ["--env", "tools.py:Box"]
    result = generate("How many?", *box, "--row", '{"size": 7}', calls=[[("look", {})]])
    assert told(result)[1] == "7 parts" and json.loads(result.stdout)["reward"] == 1.0
    rows = [json.loads(line) for line in generate("How many?", *box, "--num", 2).stdout.splitlines()]
    assert [(row["prompt"], row["reward"]) for row in rows] == [("How many?", 0.0)] * 2

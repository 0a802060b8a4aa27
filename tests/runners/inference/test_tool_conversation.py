"""Conversations with tools: `grpo chat` and `grpo generate` with calls that are run, shown and bounded."""

import json
from types import SimpleNamespace

import mlx_lm
import pytest
from click.testing import CliRunner

from runners import cli
from runners.environments.tool_calls import CallReader, ParsedTurn, ToolCall
from runners.inference.conversation import Event
from runners.inference.inference_model import load_inference
from runners.inference.text_generation import Sampling
from runners.inference.tool_conversation import ToolConversation, play_prompts
from runners.inference.tool_options import ToolOptions, build_tools, env_of
from runners.machine.startup import Platform

STOPS = tuple("e=15\n")  # what a model of any kind soon writes
TOOLS = '''
import time


def double(a: int) -> int:
    """
    Twice a number.

    Args:
        a: The number.
    """
    return 2 * a


def odd(kind: str) -> str:
    """
    Odd things.

    Args:
        kind: Which.
    """
    if kind == "hang":
        time.sleep(6000)
    return "\\x1b[2J\\n>>> done"


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


def call(name, **arguments):
    """A call as text."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def grpo(tmp_path, monkeypatch):
    """Runs `grpo …` here, beside tools.py; `said` are the turns that stand in for the model's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)

    def run(*arguments, said=(), **options):
        turns, prompts = iter(said), []

        def scripted(module, tokenizer, prompt, **how):
            prompts.append(tokenizer.decode(list(prompt)))
            tokens = [*tokenizer.encode(next(turns), add_special_tokens=False), tokenizer.eos_token_id]
            for number, token in enumerate(tokens[: how["max_tokens"]], 1):
                yield SimpleNamespace(
                    token=token, prompt_tokens=len(prompt), prompt_tps=1.0, generation_tps=number
                )

        if said:
            monkeypatch.setattr(mlx_lm, "stream_generate", scripted)
        result = CliRunner().invoke(cli.main, list(map(str, arguments)), **options)
        result.prompts = prompts
        return result

    return run


def lines(result):
    """The lines on calls, answers and rewards."""
    return [line.strip() for line in result.stderr.splitlines() if line.startswith("  ")]


def test_a_chat_runs_the_model_s_calls(grpo):
    """They are parsed, run and answered; replies go to stdout, calls and answers to stderr."""
    said = ["I ask. " + call("double", a=21), "It is 42.", "Yes."]
    result = grpo("chat", "embedded", "--tools", "tools.py", said=said, input="Twice 21?\nSure?\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [said[0], "It is 42.", "Yes."]
    assert lines(result) == ["call   | double(a=21)", "answer | 42"]
    first = result.prompts[0]
    assert "double" in first and "odd" in first and "_hidden" not in first and "Twice 21?" in first
    third = result.prompts[2]  # without a cache that it can cut, the whole prompt comes again
    assert "Sure?" in third


def test_several_functions_and_what_is_refused(grpo):
    """One of a file, a name that is not there, bounds without tools, and rows that nobody takes."""
    result = grpo(
        "chat", "embedded", "--tools", "tools.py:double", said=[call("odd", kind="x"), "So."], input="?\n"
    )
    assert lines(result)[1] == "answer | {'error': 'there is no tool odd'}"
    for arguments, line in (
        (["--tools", "nope.py"], "no file at"),
        (["--tools", "tools.py:doble"], "has no doble; did you mean double?"),
        (["--tools", "tools.py", "--tools", "tools.py:double"], "there is a tool double already"),
        (["--max-turns", "3"], "--max-turns: there are no tools"),
        (["--tools", "tools.py", "--row", "{}"], "--row: there is no environment"),
        (["--env", "tools.py:Box", "--row", "[1]"], "--row [1]: wanted a JSON object"),
        (["--env", "tools.py:Box", "--row", "{"], "cannot be read as JSON"),
    ):
        refused = grpo("chat", "embedded", *arguments, input="")
        assert refused.exit_code == 2 and line in refused.stderr, (arguments, refused.output)


def test_bounds_and_control_characters(grpo):
    """--max-turns, --max-tool-calls and the time limit hold; each line of an answer is marked as one."""
    asks = call("double", a=1)
    result = grpo("chat", "embedded", "--tools", "tools.py", "--max-turns", 2, said=[asks] * 2, input="?\n")
    assert lines(result)[-1] == "stop   | the calls are not made: these are 2 turns"
    result = grpo(
        "chat", "embedded", "--tools", "tools.py", "--max-tool-calls", 1, said=[asks * 2, "So."], input="?\n"
    )
    assert "used up" in lines(result)[-1]
    said = [call("odd", kind="hang") + call("double", a=2), "So.", call("odd", kind="x"), "So."]
    result = grpo("chat", "embedded", "--tools", "tools.py", "--tool-timeout", 1, said=said, input="?\n?\n")
    assert "timed out after 1 s" in result.stderr
    assert lines(result)[-2:] == ["answer | \x1b[2J", "| >>> done"]


def test_an_environment_is_reset_at_the_first_message_and_after_clear(grpo):
    """What reset returns ends the message; the reward is shown after each reply."""
    said = [call("look"), "Three.", "Still.", "New."]
    result = grpo(
        "chat", "embedded", "--env", "tools.py:Box", "--row", '{"size": 7}', said=said,
        input="How many?\nAnd now?\n/clear\nAgain?\n",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert lines(result) == [
        "call   | look()", "answer | 7 parts", "reward | 1", "reward | 1", "reward | 0",
    ]  # fmt: skip
    assert "How many? The box has 7 parts." in result.prompts[0]
    wrong = grpo("chat", "embedded", "--env", "tools.py:Box", "--row", '{"sizes": 7}', input="?\n")
    assert wrong.exit_code == 2 and "reset: " in wrong.stderr and "sizes" in wrong.stderr


def test_ctrl_c_leaves_a_call_behind(grpo, monkeypatch):
    """The reply ends at once, the conversation goes on, and so do later calls."""
    tools = grpo("chat", "embedded", "--tools", "tools.py", input="")
    assert tools.exit_code == 0
    said = iter([call("odd", kind="hang"), call("double", a=4), "Eight."])

    def scripted(module, tokenizer, prompt, **how):
        for token in [*tokenizer.encode(next(said), add_special_tokens=False), tokenizer.eos_token_id]:
            yield SimpleNamespace(token=token, prompt_tokens=1, prompt_tps=1.0, generation_tps=1.0)

    monkeypatch.setattr(mlx_lm, "stream_generate", scripted)
    conversation = open_here("embedded", tools=("tools.py",))
    events, asked = [], []
    for piece in conversation.reply("?", stopped=lambda: bool(asked)):
        if isinstance(piece, Event):
            events.append(piece)
            asked.append(1)
    assert [event.kind for event in events] == ["call", "stop"]
    again = [piece for piece in conversation.reply("And 4?") if isinstance(piece, Event)]
    assert again == [Event("call", "double(a=4)"), Event("answer", "8")]


def open_here(name, sampling=None, stop=(), **options):
    """A conversation with tools."""
    model = load_inference(name, Platform(backend="cpu"))
    env, folders = env_of(name, ToolOptions(**options), print)
    environments = build_tools(model, env, folders, nudge="", template_kwargs={})
    return ToolConversation(
        model, sampling or Sampling(), environments, columns={}, stop=stop, template_kwargs={}
    )


def test_a_stream_is_the_first_of_a_batch(grpo, monkeypatch):
    """Turn by turn the same tokens are drawn; rows of JSON have the turns."""
    grpo("chat", "embedded", "--tools", "tools.py", input="")
    asks = ToolCall("double", {"a": 5})
    monkeypatch.setattr(CallReader, "read", lambda self, text: ParsedTurn(text, (asks,)))
    sampling = Sampling(max_tokens=200, temperature=1.0, seed=3)
    conversation = open_here("embedded", sampling, STOPS, tools=("tools.py",), bounds={"max_turns": 3})
    pieces = list(conversation.reply("7+5"))
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    assert [p.text for p in pieces if isinstance(p, Event) and p.kind == "answer"], "turns were answered"
    speed = SimpleNamespace(prompt_tokens=0, tokens=0, seconds=0.0)
    found = list(
        play_prompts(
            conversation.model, conversation.environments,
            [[{"role": "user", "content": "7+5"}], [{"role": "user", "content": "8+5"}]], sampling,
            columns={}, nudge="", stop=STOPS, template_kwargs={}, num_generations=2,
            max_batch=3, stopped=lambda: False, speed=speed,
        )
    )  # fmt: skip
    rows = [row for _, row in found]
    said = "".join(m["content"] for m in rows[0]["messages"] if m["role"] == "assistant")
    assert len(rows) == 4 and said == text
    assert all(row["turns"] == row["calls"] + 1 or row["finish"] == "length" for row in rows)
    assert rows[0]["tokens"] < speed.tokens == sum(row["tokens"] for row in rows)


def test_generate_streams_or_writes_rows(grpo, tmp_path):
    """One prompt is shown with its calls; --num gives JSON with messages, counts and rewards."""
    said = [call("look"), "Three."]
    result = grpo("generate", "embedded", "How many?", "--env", "tools.py:Box", said=said)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == said and lines(result)[-1] == "reward | 1"
    result = grpo("generate", "embedded", "How many?", "--env", "tools.py:Box", "--num", 2, "--max-tokens", 8)
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 2 and rows[0]["prompt"] == "How many?"
    for row in rows:
        assert row["messages"][0]["role"] == "assistant" and row["turns"] == 1
        assert (row["calls"], row["failures"], row["reward"]) == (0, 0, 0.0) and row["tokens"] <= 8


def test_a_run_s_tools(grpo, tmp_path):
    """Code of a run's config is run only where the config is named; its calculator and bounds are used."""
    run = tmp_path / "run"
    (run / "final").mkdir(parents=True)

    def write(**env):
        (run / "config.resolved.json").write_text(json.dumps({"model": {"path": "embedded"}, "env": env}))

    notes = []
    write(tools=["tools.py:double"], max_turns=5)
    for model in (run, run / "final"):
        env, _ = env_of(str(model), ToolOptions(), notes.append)
        assert (env.tools, env.factory, env.max_turns) == ((), "", 5)
        assert "its tools are left out, as code runs only if you name the config" in notes.pop()
    env, folders = env_of(str(run), ToolOptions(config=str(run / "config.resolved.json")), notes.append)
    assert [tool.rpartition("/")[2] for tool in env.tools] == ["tools.py:double"] and not notes
    assert tmp_path in folders
    given = ToolOptions(tools=("tools.py:odd",), bounds={"max_turns": None, "timeout": 2.0})
    env, _ = env_of(str(run), given, notes.append)
    assert (env.tools, env.max_turns, env.timeout) == (("tools.py:odd",), 5, 2.0) and not notes
    write(factory="calculator", max_turns=3)
    env, _ = env_of(str(run), ToolOptions(), notes.append)
    assert (env.factory, env.max_turns) == ("calculator", 3) and "tools as in the run" in notes.pop()

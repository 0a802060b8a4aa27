"""Conversations with tools: `grpo chat` and `grpo generate` with calls that are run, shown and bounded."""

import json

import attrs
import pytest
from click.testing import CliRunner
from mlx_lm.utils import load_tokenizer

import grpo_fn as g
from runners import cli
from runners.environments.tool_calls import CallReader, ParsedTurn, ToolCall
from runners.inference.conversation import Conversation, Event
from runners.inference.inference_model import load_inference
from runners.inference.text_generation import generation_key, sample_batches
from runners.inference.tool_options import build_tools, env_of
from runners.machine.startup import Platform
from runners.quickstart import MODEL_DIR
from tests.support.services.scripted_engine import answers_with

TOKENIZER = load_tokenizer(MODEL_DIR)
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

        def tokens_of(prompt, sampling):
            prompts.append(TOKENIZER.decode(prompt))
            return [*TOKENIZER.encode(next(turns), add_special_tokens=False), TOKENIZER.eos_token_id]

        if said:
            answers_with(monkeypatch, tokens_of)
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
        (["--tools", "tools.py", "--row", "{}"], "--row: found no environment"),
        (["--env", "tools.py:Box", "--row", "[1]"], "--row [1]: expected a JSON object"),
        (["--env", "tools.py:Box", "--row", "{"], "cannot be read as JSON"),
    ):
        refused = grpo("chat", "embedded", *arguments, input="")
        assert refused.exit_code == 2 and line in refused.stderr, (arguments, refused.output)


def test_bounds_and_control_characters(grpo, tmp_path):
    """Those of --config hold for other tools; each line of an answer is marked as one."""
    config = ["--config", "bounds.toml", "--tools", "tools.py"]
    keys = "max_turns = 2\nmax_tool_calls = 1\ntimeout = 1"
    (tmp_path / "bounds.toml").write_text(f'model.path = "embedded"\n[env]\n{keys}\n')
    asks = call("double", a=1)
    result = grpo("chat", "embedded", *config, said=[asks] * 2, input="?\n")
    assert lines(result)[-1] == "stop   | the calls are not made: these are 2 turns"
    assert "used up" in lines(grpo("chat", "embedded", *config, said=[asks * 2, "So."], input="?\n"))[-1]
    said = [call("odd", kind="hang"), "So.", call("odd", kind="x"), "So."]
    result = grpo("chat", "embedded", *config, said=said, input="?\n?\n")
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

    def tokens_of(prompt, sampling):
        return [*TOKENIZER.encode(next(said), add_special_tokens=False), TOKENIZER.eos_token_id]

    answers_with(monkeypatch, tokens_of)
    conversation = open_here("embedded", tools=("tools.py",))
    events, asked = [], []
    for piece in conversation.reply("?", should_stop=lambda: bool(asked)):
        if isinstance(piece, Event):
            events.append(piece)
            asked.append(1)
    assert [event.kind for event in events] == ["call", "stop"]
    again = [piece for piece in conversation.reply("And 4?") if isinstance(piece, Event)]
    assert again == [Event("call", "double(a=4)"), Event("answer", "8")]


def open_here(name, sampling=None, stop=(), turns=8, **options):
    """A conversation with tools."""
    model = load_inference(name, Platform(backend="cpu"))
    env, folders = env_of(name, print, **options)
    env = attrs.evolve(env, max_turns=turns)
    environments = build_tools(model, env, folders, nudge="", template_kwargs={})
    find_stop = model.decoder.find_stop(stop)
    sampling = attrs.evolve(sampling or g.Sampling(), eos_ids=model.eos_ids, find_stop=find_stop)
    return Conversation(model, sampling, key=generation_key(3), environments=environments)


def test_a_stream_is_the_first_of_a_batch(grpo, monkeypatch):
    """Turn by turn the same tokens are drawn; rows of JSON have the turns."""
    grpo("chat", "embedded", "--tools", "tools.py", input="")
    asks = ToolCall("double", {"a": 5})
    monkeypatch.setattr(CallReader, "read", lambda self, text: ParsedTurn(text, (asks,)))
    sampling = g.Sampling(max_new_tokens=200)
    conversation = open_here("embedded", sampling, STOPS, turns=3, tools=("tools.py",))
    pieces = list(conversation.reply("7+5"))
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    assert [p.text for p in pieces if isinstance(p, Event) and p.kind == "answer"], "turns were answered"
    model, environments = conversation.model, conversation.environments
    examples = [
        model.example([{"role": "user", "content": text}], tools=environments.schemas)
        for text in ("7+5", "8+5")
    ]
    found = sample_batches(
        model.engine, examples, attrs.evolve(conversation.sampling, num_generations=2),
        key=conversation.key, decoder=model.decoder, rows=3, environments=environments,
    )  # fmt: skip
    first, second = found
    said = "".join(m["content"] for m in first.played.messages[0] if m["role"] == "assistant")
    assert len(first.texts) == len(second.texts) == 2 and said == text
    for batch in (first, second):
        counts = batch.played.counts
        assert all(
            turns == calls + 1 or finish == "length"
            for turns, calls, finish in zip(counts["turns"], counts["calls"], batch.finish, strict=True)
        )
        assert batch.lengths == list(map(len, batch.played.sampled))


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
        env, _ = env_of(str(model), notes.append)
        assert (env.tools, env.factory, env.max_turns) == ((), "", 5)
        assert "its tools are left out, as code runs only if you name the config" in notes.pop()
    env, folders = env_of(str(run), notes.append, config=str(run / "config.resolved.json"))
    assert [tool.rpartition("/")[2] for tool in env.tools] == ["tools.py:double"] and not notes
    assert tmp_path in folders
    env, _ = env_of(str(run), notes.append, tools=("tools.py:odd",))
    assert (env.tools, env.max_turns) == (("tools.py:odd",), 5) and not notes
    write(factory="calculator", max_turns=3)
    env, _ = env_of(str(run), notes.append)
    assert (env.factory, env.max_turns) == ("calculator", 3) and "tools as in the run" in notes.pop()

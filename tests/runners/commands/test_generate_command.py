"""`grpo generate` and `grpo chat`: output streams, exit codes, pipes, and Ctrl-C in a separate process."""

import json
import os
import signal
import subprocess
import sys

import pytest

from runners.config.reading import PRESET_FOLDER
from tests.support.commands import grpo

ROOT = PRESET_FOLDER.parent
QUESTION = "Ida has 12 cards. Eva has 3 times as many. They sell 9. How many are left?"


def test_one_prompt_gives_text_on_stdout_and_speed_on_stderr():
    """Standard output contains only the nudge and the reply."""
    options = ("--temperature", "0", "--nudge", "<reasoning>", "--max-tokens", "60")
    result = grpo("generate", "embedded", QUESTION, *options)
    assert result.stdout.startswith("<reasoning>") and result.stdout.endswith("</answer>\n")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("prompt ") and "tok/s" in last and "peak memory" in last
    assert grpo("generate", "embedded", "-", *options, input=QUESTION).stdout == result.stdout


def test_many_prompts_give_a_json_line_each(tmp_path):
    """The order is kept, on stdout and in a file, and --num sets the completions per prompt."""
    (tmp_path / "p.jsonl").write_text(f'{{"question": "{QUESTION}"}}\n{{"question": "7+5"}}\n')
    options = ("--prompts", "p.jsonl", "--column", "question", "--max-tokens", "8", "--temperature", "1")
    result = grpo("generate", "embedded", *options)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == [QUESTION, "7+5"]
    assert all(set(row) == {"prompt", "completion", "finish", "tokens"} for row in rows)
    assert all(row["tokens"] == 8 or row["finish"] == "stop" for row in rows)
    written = grpo("generate", "embedded", *options, "--num", "2", "--out", "a.jsonl")
    assert not written.stdout
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in lines] == [QUESTION, QUESTION, "7+5", "7+5"]
    assert lines[0] == rows[0] and lines[2] == rows[1] and lines[0] != lines[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embedded"], "expected either PROMPT or --prompts FILE"),
        (["embedded", "  "], "the prompt is empty"),
        (["nope/nope/nope", "x"], 'MODEL = "nope/nope/nope": there is no such folder'),
        (["embedded", "--prompts", "p.txt"], "--prompts p.txt: cannot be read as text"),
        (["embedded", "x", "--out", "no/x"], "refused by the system: FileNotFoundError: [Errno 2] No such"),
        (["embedded", "x", "--top-p", "0"], "Invalid value for '--top-p'"),
        (["embedded", "x", "--temprature", "0"], "--temperature"),
    ],
)
def test_faults_end_with_code_2_and_a_line(arguments, message):
    """If possible, this happens before the model is loaded."""
    result = grpo("generate", *arguments, code=2)
    assert not result.stdout and message in result.stderr


# A model that never ends, and says one letter at a time, slowly: what Ctrl-C does can be watched. A line on
# stderr tells that the next message is waited for: some time would be too short on a busy machine.
ENDLESS = """
import sys, time
import runners.machine.startup
runners.machine.startup.load_blas()
from runners.cli import main
from runners.commands import generate
from runners.engines.engine import Token
from runners.engines.local import LocalEngine
def tokens(self, ticket, *, should_stop=lambda: False):
    while True:
        time.sleep(0.02)
        yield Token(50, 0.0, 1)
        if should_stop():
            return
def reading(read=generate._read):
    print("reading", file=sys.stderr, flush=True)
    return read()
LocalEngine.tokens, generate._read = tokens, reading
main()
"""


def start(*arguments):
    """Starts `grpo …` with that model in a separate process; returns it and its standard streams."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, *arguments],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin and process.stdout and process.stderr
    return process, process.stdin, process.stdout, process.stderr


def test_ctrl_c_ends_the_reply_of_generate():
    """The text so far and the speed are printed, and the code is 130."""
    process, _, stdout, _ = start("generate", "embedded", "x")
    assert len(stdout.read(5)) == 5  # the reply has begun
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=600)
    assert process.returncode == 130 and out.endswith("\n")
    assert "peak memory" in error and "Traceback" not in error


def test_ctrl_c_ends_a_chat_s_reply_and_twice_the_program():
    """After one Ctrl-C, the next message is answered; two in a row end the program with 130."""
    process, stdin, stdout, stderr = start("chat", "embedded")
    for _ in range(2):
        assert any(line == "reading\n" for line in stderr)
        stdin.write("hello\n")
        stdin.flush()
        assert len(stdout.read(5)) == 5
        process.send_signal(signal.SIGINT)
        while stdout.read(1) != "\n":
            pass
    assert any(line == "reading\n" for line in stderr)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 130 and "peak memory" in error and "Traceback" not in error


def test_a_chat_through_pipes():
    """Each line is a message and each reply a line; /clear forgets, /help shows help, /exit ends."""
    options = ("--temperature", "0", "--max-tokens", "12")
    first = grpo("chat", "embedded", *options, input="7+5\n").stdout
    assert first.count("\n") == 1
    both = grpo("chat", "embedded", *options, input="7+5\n\n/clear\n/help\n7+5\n/exit\n7+5\n")
    assert both.stdout == first * 2
    assert all(word in both.stderr for word in ("/clear", "/exit", "Ctrl-D", "peak memory"))
    after = grpo("chat", "embedded", *options, input=f"{QUESTION}\n7+5\n").stdout.splitlines(keepends=True)
    assert after[-1] != first, "the first turn is a part of the second's prompt"

"""`grpo generate` and `grpo chat`: what goes where, exit codes, pipes, and Ctrl-C in a process of its own."""

import json
import os
import signal
import subprocess
import sys

import pytest

from runners.config.reading import PRESET_FOLDER
from tests.support.commands import grpo

# The beginning of a program in which every engine gives the tokens that `tokens()` gives, one at a time.
SCRIPTED = """
import sys
import runners.machine.startup
runners.machine.startup.load_blas()
from runners.engines.engine import Token
from runners.engines.local import LocalEngine
def stream(self, request, sampling, *, key, should_stop=lambda: False):
    for token in tokens():
        yield Token(token, 0.0, 1)
        if should_stop():
            return
LocalEngine.stream = stream
"""


ROOT = PRESET_FOLDER.parent
QUESTION = "Ida has 12 cards. Eva has 3 times as many. They sell 9. How many are left?"


def start(*arguments, code="from runners.cli import main; main()", **options):
    """`grpo …` in a process of its own, with pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        text=True,
        stdin=options.get("stdin", subprocess.DEVNULL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def test_one_prompt_gives_text_on_stdout_and_speed_on_stderr():
    """The nudge and the reply, nothing else, on stdout."""
    options = ("--temperature", "0", "--nudge", "<reasoning>", "--max-tokens", "60")
    result = grpo("generate", "embedded", QUESTION, *options)
    assert result.stdout.startswith("<reasoning>") and result.stdout.endswith("</answer>\n")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("prompt ") and "tok/s" in last and "peak memory" in last
    assert grpo("generate", "embedded", "-", *options, input=QUESTION).stdout == result.stdout


def test_many_prompts_give_a_json_line_each(tmp_path):
    """In their order, to stdout or to a file, several completions of each where asked for."""
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
        (["embedded", "x", "--prompts", "y"], "expected either PROMPT or --prompts FILE"),
        (["embedded", "  "], "the prompt is empty"),
        (["nope/nope/nope", "x"], 'MODEL = "nope/nope/nope": there is no such folder'),
        (["embedded", "--prompts", "p.txt"], "--prompts p.txt: there is no such file"),
        (
            ["embedded", "x", "--num", "2", "--out", "no/such/folder"],
            "refused by the system: FileNotFoundError: [Errno 2] No such file or directory: 'no/such/folder'",
        ),
        (["embedded", "x", "--top-p", "0"], "Invalid value for '--top-p'"),
        (["embedded", "x", "--temprature", "0"], "--temperature"),
    ],
)
def test_faults_end_with_code_2_and_a_line(arguments, message):
    """Before the model is loaded where that is possible."""
    result = grpo("generate", *arguments, code=2)
    assert not result.stdout and message in result.stderr


# A model that never ends, and says one letter at a time, slowly: what Ctrl-C does can be watched.
ENDLESS = f"""{SCRIPTED}
import time
def tokens():
    number = 0
    while True:
        number += 1
        time.sleep(0.02)
        yield 50
from runners.cli import main
main()
"""


# What tells, on stderr, that a signal or the next message is being waited for or has been taken: a test that
# sent the next signal after some time instead would fail wherever a busy machine takes longer.
TELLING = """
import sys
from runners.commands import chat
from runners.machine.signals import Interrupts
def telling(function, name, before):
    def call(*arguments):
        if before:
            print(name, file=sys.stderr, flush=True)
        found = function(*arguments)
        if not before:
            print(name, file=sys.stderr, flush=True)
        return found
    return call
chat._read = telling(chat._read, "reading", True)
Interrupts._receive = telling(Interrupts._receive, "received", False)
"""


def wait_for(process, word):
    """Reads stderr up to a line that is this word."""
    for line in process.stderr:
        if line.strip() == word:
            return
    raise AssertionError(f"the process ended without {word}")


def read_some(process, count=5):
    """Waits until the reply has begun."""
    text = process.stdout.read(count)
    assert len(text) == count
    return text


def test_ctrl_c_ends_the_reply_of_generate():
    """The text so far, the speed, code 130."""
    process = start("generate", "embedded", "x", code=ENDLESS)
    read_some(process)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=600)
    assert process.returncode == 130 and out.endswith("\n")
    assert "peak memory" in error and "Traceback" not in error


def test_ctrl_c_ends_a_chat_s_reply_and_twice_the_program():
    """After the first the next message is answered; after two in a row the program ends with 130."""
    process = start("chat", "embedded", code=TELLING + ENDLESS, stdin=subprocess.PIPE)
    wait_for(process, "reading")
    for _ in range(2):
        process.stdin.write("hello\n")
        process.stdin.flush()
        read_some(process)
        process.send_signal(signal.SIGINT)
        while process.stdout.read(1) != "\n":
            pass
        wait_for(process, "reading")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 130 and "peak memory" in error and "Traceback" not in error


def test_a_chat_through_pipes():
    """Each line a message, each reply a line; /clear forgets, /help is no message, /exit ends."""
    options = ("--temperature", "0", "--max-tokens", "12")
    first = grpo("chat", "embedded", *options, input="7+5\n").stdout
    assert first.count("\n") == 1
    both = grpo("chat", "embedded", *options, input="7+5\n\n/clear\n/help\n7+5\n/exit\n7+5\n")
    assert both.stdout == first * 2
    assert all(word in both.stderr for word in ("/clear", "/exit", "Ctrl-D", "peak memory"))
    after = grpo("chat", "embedded", *options, input=f"{QUESTION}\n7+5\n").stdout.splitlines(keepends=True)
    assert after[-1] != first, "the first turn is a part of the second's prompt"

"""`grpo serve` as a process: its line, its program in the docs, its end."""

import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner

from runners.cli import main
from tests.support.pages import ROOT, snippets
from tests.support.serving import conversation


@contextmanager
def server(*options):
    """The process of a server, and its address."""
    command = [Path(sys.executable).with_name("grpo"), "serve", "embedded", "--port", "0", *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("http://127.0.0.1:"), (line, process.stderr.read(), process.wait())
            yield process, line.split()[0]
        finally:
            process.kill()


def test_the_program_of_the_page(tmp_path):
    """The program in docs/serve.md prints the model's words as they are sampled."""
    (program,) = [each for each in snippets(ROOT / "docs" / "serve.md") if "serve" in each.comments]
    assert program.line < 20
    with server() as (_, url):
        file = tmp_path / "program.py"
        file.write_text(program.text.replace("http://127.0.0.1:8000", url))
        done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_the_first_signal_finishes_what_runs_and_the_second_ends():
    """After SIGTERM, the running answer is completed, new calls are refused, and the exit code is 0; a
    second signal ends the process at once."""
    body = {"messages": conversation("How many?"), "max_tokens": 400, "ignore_eos": True}
    with server() as (process, url):
        answers = []
        chat = f"{url}/v1/chat/completions"
        caller = threading.Thread(target=lambda: answers.append(httpx2.post(chat, json=body, timeout=120)))
        with httpx2.stream("POST", chat, json={**body, "stream": True}, timeout=120) as stream:
            lines = stream.iter_lines()
            next(lines)
            caller.start()
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        caller.join()
        assert answers[0].status_code in (200, 503)
        assert process.wait(60) == 0
    with server() as (process, url):
        with httpx2.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}) as stream:
            next(stream.iter_lines())
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)
        assert "Traceback" not in process.stderr.read()


def test_the_options_are_those_of_a_call_that_names_nothing():
    """--temperature, --name, --max-length and --api-key are the defaults of calls."""
    options = ["--temperature", "0", "--name", "mine", "--max-length", "64", "--api-key", "key"]
    with server(*options) as (_, url), httpx2.Client(base_url=f"{url}/v1", timeout=60) as client:
        assert client.get("/models").status_code == 401
        client.headers["Authorization"] = "Bearer key"
        (card,) = client.get("/models").json()["data"]
        assert (card["id"], card["max_model_len"]) == ("mine", 64)
        body = {"model": "mine", "messages": conversation("7+5")}
        answers = [client.post("/chat/completions", json=body).json() for _ in "123"]
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--host", "0.0.0.0"], "requires --api-key KEY"),
        (["--tinker", "--api-key", "key"], "starts with tml-"),
        ([], "pip install 'grpo_fn[serve]'"),
        (["--tinker"], "pip install 'grpo_fn[tinker]'"),
        (["--port", "70000"], "70000"),
        (["--api-key"], "--api-key"),
        (["--max-length", "1"], "--max-length"),
    ],
)
def test_wrong_options_and_missing_extras_are_refused(options, line, monkeypatch):
    """One line names them before the model is read."""
    monkeypatch.setattr("runners.commands.serve.find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["serve", "nowhere/nothing", *options])
    assert result.exit_code == 2 and line in result.output

"""SECURITY.md's table of what each command trusts: every cell is tried, and none is missing."""

import json
import re
import shutil
import socket
import time
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save

from runners.cli import COMMANDS, main
from tests.support.pages import ROOT, codes, tables
from tests.support.runs.report_runs import make_run
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import small

EVIL = """
open({canary!r}, "w").close()
def tool(*arguments, **named):
    raise ValueError("no")
class Box:
    def reset(self, **row):
        pass
    def look(self) -> str:
        '''Looks.'''
        return ""
def load(folder, config):
    raise ValueError("no")
"""
# A use of each command, and what it writes into its working folder.
USES = {
    "run": (["CONFIG"], {"outputs"}),
    "sft": (["CONFIG", "--set", "rollout.max_new_tokens=80"], {"outputs"}),
    "check": (["CONFIG"], set()),
    "difficulty": (["CONFIG", "--samples", "1"], {"outputs"}),
    "plan": (["CONFIG"], set()),
    "bench": (["CONFIG", "--steps", "1"], set()),
    "init": (["MODEL", "embedded", "--out", "made"], {"made"}),
    "generate": (["MODEL", "hi", "--max-tokens", "1"], set()),
    "chat": (["MODEL", "--max-tokens", "1"], set()),
    "serve": (["MODEL", "--port", "0"], set()),
    "eval": (["MODEL", "--data", "embedded", "--samples", "1", "--max-tokens", "1"], set()),
    "convert": (["MODEL", "--out", "made"], {"made"}),
    "export": (["MODEL", "--out", "made"], {"made"}),
    "report": (["run"], {"run/report.html"}),
    "runs": (["."], set()),
}
# What a word of the table stands for: the first argument, and further ones.
CODE = {
    "CONFIG": ("evil.toml", []),
    "--set": ("", ["--set", "data.transform=evil.py:tool"]),
    "--tools": ("", ["--tools", "evil.py"]),
    "--env": ("", ["--env", "evil.py:Box"]),
    "--config": ("", ["--config", "tools.toml"]),
    "--loader": ("", ["--loader", "evil.py:load"]),
    "--trust-remote-code": ("coded", ["--trust-remote-code"]),
}
NOBODY = "nobody/nothing"
HUB = {
    "CONFIG": ("", ["--set", f"model.path={NOBODY}"]),
    "MODEL": (NOBODY, []),
    "adapters": ("adapters", []),
    "--data": ("", ["--data", NOBODY]),
    "--push": ("", ["--push", NOBODY]),
}


def table():
    """The rows: a command -> the words of each further cell."""
    (found,) = [each for each in tables(ROOT / "SECURITY.md") if each.header[1:2] == ("runs code from",)]
    rows = {}
    for first, *row in found.rows:
        for command in re.findall(r"`grpo (\w+)`", first):
            rows[command] = [codes(cell) for cell in row]
    return rows


TABLE = table()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    """A server ends at once."""
    monkeypatch.setattr("runners.serve.service.Service.run", lambda *_, **__: None)


def cells(column):
    """The pairs of a command and a word of one column."""
    return [(command, word) for command, row in TABLE.items() for word in row[column]]


@pytest.fixture(name="place")
def _place(tmp_path, monkeypatch):
    """A folder with models, configs, and a run whose keys, right or nearly, name code."""
    monkeypatch.chdir(tmp_path)
    code = EVIL.format(canary=str(tmp_path / "ran"))
    coded, run = make_model_folder(tmp_path / "coded", layers=1), make_run(tmp_path / "run")
    for folder in (tmp_path, coded, run):
        (folder / "evil.py").write_text(code)
    for folder in (tmp_path / "model", run / "final"):
        make_model_folder(folder, layers=1)
    config = json.loads((coded / "config.json").read_text())
    (coded / "config.json").write_text(json.dumps(config | {"model_file": "evil.py"}))
    recorded = {
        "env": {"tools": ["evil.py"], "factory": "evil.py:Box"},
        "reward": {"functions": ["evil.py:tool"]},
        "data": {"transform ": "evil.py:tool"},
        "model": {"loader ": "evil.py:load", "trust_remote_code ": True},
    }
    (run / "config.resolved.json").write_text(json.dumps(recorded))
    Path("plain.toml").write_text(small())
    Path("evil.toml").write_text(small(data={"transform": "evil.py:tool"}))
    Path("tools.toml").write_text(small(env={"factory": "evil.py:Box"}))
    Path("adapters").mkdir()
    Path("adapters/adapters.safetensors").write_bytes(save({"a": np.zeros(1, np.float32)}))
    lora = {"rank": 1, "scale": 1.0, "dropout": 0.0}
    stated = {"model": NOBODY, "fine_tune_type": "lora", "num_layers": 1, "lora_parameters": lora}
    Path("adapters/adapter_config.json").write_text(json.dumps(stated))
    return tmp_path


@pytest.fixture(name="asked")
def _asked(monkeypatch):
    """The hosts that were looked up; none is reached."""
    found = []

    def refuse(host, *_, **__):
        found.append(host)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    return found


def use(command, first="", more=(), model="model"):
    """Uses a command, in this process; `first` replaces its first argument. No traceback; its exit code."""
    (given, *rest), _ = USES[command]
    first = first or {"CONFIG": "plain.toml", "MODEL": model}.get(given, given)
    result = CliRunner().invoke(main, [command, first, *rest, *more], input="hi\n")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def files(place):
    """Everything in the working folder, by name."""
    return {str(path.relative_to(place)) for path in place.rglob("*") if "__pycache__" not in path.parts}


def test_every_command_and_option_is_in_the_table():
    """A command has a row, and an option that brings code, fetches or writes is in its cell."""
    assert set(TABLE) == set(COMMANDS)
    for name, (code, hub, written) in TABLE.items():
        command = main.get_command(click.Context(main), name)
        assert command is not None
        options = [option for option in command.params if isinstance(option, click.Option)]
        assert {part for option in options for part in option.opts} & {*CODE} == {*code} - {"CONFIG"}, name
        places = {*USES[name][0][:1]} if name in USES else set()
        fetching = {part for option in options for part in option.opts} | places
        assert fetching & {*HUB} == {*hub} - {"adapters"}, name
        writing = {option.opts[0] for option in options if option.opts[0] in ("--out", "--json")}
        flags = {option.opts[0] for option in options if option.is_flag}
        assert writing - flags <= {*written}, name


@pytest.mark.parametrize("command", USES)
def test_a_command_trusts_nothing_by_itself(place, asked, command):
    """On sound files it writes what the table says; on a foreign run no code runs, and nothing is fetched."""
    before = files(place)
    assert use(command).exit_code == 0
    new = files(place) - before
    top = {name for name in new if not any(name.startswith(f"{other}/") for other in new)}
    assert top == USES[command][1] and asked == []
    if USES[command][0][0] == "MODEL":
        for foreign in ("run", "run/final", "coded"):
            shutil.rmtree("made", ignore_errors=True)
            use(command, model=foreign)
    assert not Path("ran").exists() and asked == []


@pytest.mark.parametrize(("command", "word"), cells(0))
def test_code_that_is_named_runs(place, command, word):
    """So that the test above can fail."""
    first, more = CODE[word]
    use(command, first, more)
    assert Path("ran").exists()


@pytest.mark.parametrize(("command", "word"), cells(1))
def test_names_on_the_hub_are_asked_for(monkeypatch, place, asked, command, word):
    """With one line where it cannot be reached."""
    monkeypatch.setattr(time, "sleep", lambda _: None)  # huggingface_hub tries again for 23 s
    first, more = HUB[word]
    assert use(command, first, more).exit_code == 2
    assert asked

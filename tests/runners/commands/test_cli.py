"""The command line: output, files, exit codes, and the speed of --help."""

import json
import os
import re
import resource
import signal
import sys
import types
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from grpo_fn import __version__
from runners import cli
from runners.config.loading import load_config
from runners.config.reading import PRESET_FOLDER
from runners.machine.signals import Stopped
from tests.support.processes.new_process import python

ROOT = PRESET_FOLDER.parent
MODEL = 'model.path = "embedded"\n'


@pytest.fixture
def invoke(tmp_path):
    """Runs a command in this process, in a new folder that contains train.toml."""
    (tmp_path / "train.toml").write_text(MODEL)
    return lambda *arguments, command=cli.run_command: CliRunner().invoke(command, arguments)


@pytest.fixture
def training(monkeypatch):
    """Replaces the training loop: `calls` contains its arguments, and it raises `fault`."""
    loop = types.SimpleNamespace(calls=[], fault=None)

    def run_training(config, **how):
        loop.calls.append(how)
        if loop.fault:
            raise loop.fault

    monkeypatch.setitem(
        sys.modules, "runners.training.train", types.SimpleNamespace(run_training=run_training)
    )
    return loop


ALL_HELP = """
import sys
from click.testing import CliRunner
from runners import cli
for words in [[], *([name] for name in cli.COMMANDS)]:
    text = CliRunner().invoke(cli.main, [*words, "--help"], catch_exceptions=False).output
    assert text.startswith("Usage: "), text
    heavy = {"mlx", "mlx_lm", "datasets", "rich", "numpy", "transformers", "tiktoken", "grpo_fn"}
    assert not heavy & sys.modules.keys(), words
"""


def test_help_answers_at_once_and_imports_nothing_heavy():
    """The help of all commands is shown in one process, with click as the only heavy import."""
    spent = []
    for _ in range(2):  # the first may have to compile the modules
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        python("-c", ALL_HELP)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert 0 < spent[-1] < 0.6, spent  # its own time: other processes may be busy


def command_of(name):
    """The group's command with this name."""
    found = cli.main.get_command(click.Context(cli.main), name)
    assert found is not None
    return found


def test_the_group_lists_every_command(invoke):
    """Each command has its name and one line of help; `grpo run` and `grpo-run` are the same."""
    assert command_of("run") is cli.run_command
    for command in (cli.main, cli.run_command):
        assert invoke("--version", command=command).output == f"grpo_fn, version {__version__}\n"
    text = invoke("--help", command=cli.main).output
    for name in cli.COMMANDS:
        short = command_of(name).get_short_help_str()
        assert command_of(name).name == name and f"  {name} " in text
        assert short.endswith(".") and not short.endswith("..")


CONVERT = "--calibrate --column --dequantize --step --text-only --hf-path --mlx-path --image"
MLX_LM = "--model --prompt --adapter-path --save-path --system-prompt --prefill-response --max-lora-rank"
GENERATE = "--prompts --column --num --batch --out --image --raw --tools --env --config --row"
LIKE_GENERATE = (
    "--system --nudge --stop --no-prompt-file --temperature --top-p --top-k --min-p --repetition-penalty "
    "--seed --max-tokens --adapter --loader --trust-remote-code"
)
PAGES = [  # command, its page, what the page leaves out, what it names besides
    ("eval", "evaluation", "--batch --trust-remote-code", ""),
    ("export", "conversion", "", f"{CONVERT} {MLX_LM}"),
    ("serve", "serve", LIKE_GENERATE, ""),
    ("generate", "generation", "", ""),
    ("chat", "generation", "", GENERATE),
]


@pytest.mark.parametrize(("name", "page", "left_out", "others"), PAGES, ids=[row[0] for row in PAGES])
def test_a_commands_page_has_its_options_and_no_others(name, page, left_out, others):
    """Options of other commands that the page also describes are listed above."""
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    options = {
        option for parameter in command_of(name).params for option in parameter.opts if option[:2] == "--"
    }
    named = set(re.findall(r"--[a-z][a-z-]*[a-z]|--k\b", text))
    assert named == (options - set(left_out.split())) | set(others.split())


def test_a_dry_run_shows_and_writes_the_resolved_config_and_stops(invoke, training, tmp_path):
    """The printed TOML loads to the same config; JSON is in the run's folder; no training."""
    result = invoke("train.toml", "--set", "run.name=dry", "--set", "loss.preset=dapo", "--dry-run")
    assert result.exit_code == 0 and not training.calls
    assert result.stderr == f"written to {os.path.join('outputs', 'dry', 'config.resolved.json')}\n"
    config = load_config("train.toml", ["run.name=dry", "loss.preset=dapo"]).check()
    (tmp_path / "shown.toml").write_text(result.stdout, encoding="utf-8")
    assert load_config("shown.toml") == config
    written = json.loads((tmp_path / "outputs/dry/config.resolved.json").read_text(encoding="utf-8"))
    assert written == config.to_dict() and written["loss"]["epsilon_high"] == 0.28


@pytest.mark.parametrize(
    ("arguments", "origin", "changes", "overwrite"),
    [
        ([], False, False, False),
        (["--resume"], True, False, False),
        (["--resume", "--allow-config-change"], True, True, False),
        (["--resume", "out/checkpoint-3"], Path("out/checkpoint-3"), False, False),
        (["--resume=out"], Path("out"), False, False),
        (["--overwrite"], False, False, True),
    ],
)
def test_how_a_run_begins_is_handed_on(invoke, training, arguments, origin, changes, overwrite):
    """Training receives --resume (with or without a folder), --allow-config-change and --overwrite."""
    assert invoke("train.toml", *arguments).exit_code == 0
    (how,) = training.calls
    assert not how.pop("signals").stopping and how.pop("ranks").is_alone
    assert how == {"resume": origin, "allow_config_change": changes, "overwrite": overwrite}


@pytest.mark.parametrize(
    ("argv", "on_path", "program"),
    [("/usr/bin/grpo-run", True, "grpo-run"), (".venv/bin/grpo-run", False, ".venv/bin/grpo-run")],
)
@pytest.mark.parametrize("command", [cli.run_command, cli.sft_command], ids=["run", "sft"])
def test_an_interrupted_run_shows_how_to_continue(
    invoke, training, monkeypatch, argv, on_path, program, command
):
    """The command is quoted for the shell, and has --resume once the run has written its folder."""
    monkeypatch.setattr(sys, "argv", [argv])
    monkeypatch.setattr("shutil.which", lambda name: argv if on_path else None)
    monkeypatch.setattr(command, "name", "grpo-run")
    stop = 'rollout.stop=["</answer>"]'
    named = ["--resume", "out/a b", "--allow-config-change"]
    for begun, given, options in (
        (True, ["--overwrite"], " --resume"),
        (True, named, " --resume"),
        (False, ["--overwrite"], " --overwrite"),
        (False, named, " --resume 'out/a b' --allow-config-change"),
        (False, [], ""),
    ):
        training.fault = Stopped(signal.SIGTERM)
        training.fault.begun = begun
        result = invoke("train.toml", *given, "--set", stop, command=command)
        assert result.exit_code == 143
        line = f"to continue: {program} train.toml --set '{stop}'{options}"
        assert result.stderr.splitlines()[-2:] == ["interrupted", line]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rum"], "No such command 'rum'. Did you mean 'run'?"),
        (["run"], "Missing argument 'CONFIG'"),
        (["run", "train.toml", "--resume", "--overwrite"], "--resume and --overwrite cannot be combined"),
        (["run", "train.toml", "--allow-config-change"], "--allow-config-change requires --resume"),
    ],
)
def test_unusable_command_lines_are_refused(invoke, training, arguments, message):
    """The exit code is 2, and nothing is done."""
    result = invoke(*arguments, command=cli.main)
    assert result.exit_code == 2 and message in result.stderr and not training.calls

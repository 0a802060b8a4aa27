"""Parts of the manual that are made from the code: `<!-- made: NAME -->` on a page is where one stands."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]

SUBJECTS = {  # folder or module of grpo_fn → heading
    "algorithm": "Advantages and the loss",
    "learner": "The learner",
    "rollout": "Completions",
    "completions": "Completions",
    "policy": "The policy",
    "": "Tools",
}


def commands() -> str:
    """Every command with its arguments and options, from the click commands."""
    from runners import cli

    with click.Context(cli.main, info_name="grpo") as group:
        names = cli.main.list_commands(group)
        found = {name: cli.main.get_command(group, name) for name in names}
        parts = [_command(command, group, name) for name, command in found.items() if command]
    return "\n\n".join(parts)


def _command(command: click.Command, group: click.Context, name: str) -> str:
    """A command's section: its line, what it does, its options as a table, its examples."""
    with click.Context(command, info_name=name, parent=group) as context:
        usage = " ".join(command.collect_usage_pieces(context))
        rows = [
            f"| {_codes(option)} | {_cell(option.help or '')} |"
            for option in command.get_params(context)
            if isinstance(option, click.Option)
            and not option.hidden
            and "--help" not in option.opts
        ]
    texts = [_paragraphs(text) for text in (command.help, command.epilog) if text]
    table = "\n".join(["| option | meaning |", "|---|---|", *rows])
    head = [f"## grpo {name}", f"```text\ngrpo {name} {usage}\n```", texts[0], table]
    return "\n\n".join([*head, *texts[1:]])


def _codes(option: click.Option) -> str:
    """Its spellings, with what it takes."""
    takes = option.metavar or option.make_metavar(click.Context(click.Command("")))
    value = "" if option.is_flag else f" {takes}"
    return ", ".join(f"`{spelling}{value}`" for spelling in option.opts)


def _cell(text: str) -> str:
    """A help text in a table: nothing in it is Markdown."""
    return re.sub(r"([|*_<\[\]])", r"\\\1", text)


def _paragraphs(text: str) -> str:
    """A help text; a part with indented lines, such as examples, keeps them."""
    parts = []
    for part in inspect.cleandoc(text).split("\n\n"):
        part = part.removeprefix("\b").strip("\n")
        parts.append(f"```text\n{part}\n```" if "\n  " in part else _cell(" ".join(part.split())))
    return "\n\n".join(parts)


def functions() -> str:
    """The public names of grpo_fn by subject, each with its docstring."""
    core = importlib.import_module("grpo_fn")
    found: dict[str, list[str]] = {heading: [] for heading in SUBJECTS.values()}
    for name, value in vars(core).items():
        if name.startswith("_") or inspect.ismodule(value):
            continue
        module = _home(name, value)
        heading = SUBJECTS.get(module.split(".")[1], SUBJECTS[""])
        found[heading].append(f"::: {module}.{name}")
    return "\n\n".join(f"## {heading}\n\n" + "\n\n".join(names) for heading, names in found.items())


def _home(name: str, value: object) -> str:
    """The module that a public name is defined in."""
    module = inspect.getmodule(value) if callable(value) else None
    if module is not None and module.__name__.startswith("grpo_fn."):
        return module.__name__
    for folder in ("algorithm.presets",):
        module = importlib.import_module(f"grpo_fn.{folder}")
        if name in vars(module):
            return module.__name__
    raise LookupError(f"grpo_fn.{name}: no module is known that defines it")


def every_key() -> str:
    """A config with every key at its default, from the sections' classes."""
    from runners.config.loading import load_config

    config = load_config(None, ["model.path=Qwen/Qwen2.5-0.5B-Instruct"]).check()
    return f"```toml\n{config.to_toml().strip()}\n```"


def figures() -> str:
    """The list of figures of README.md, which come from benchmarks/results."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.partition("<!-- figures:begin -->")[2].partition("<!-- figures:end -->")[0].strip()


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "every_key": every_key,
    "figures": figures,
    "functions": functions,
}
"""Name → function that makes its Markdown."""

"""`grpo --install-completion`: the shell's Tab key completes commands and options, by click."""

from __future__ import annotations

import os
from pathlib import Path

import click

from runners.errors import UserError, show
from runners.machine.terminal import echo

_DATA, _CONFIG = ("XDG_DATA_HOME", "~/.local/share"), ("XDG_CONFIG_HOME", "~/.config")
_FILES = {  # by shell: where it looks for completions; zsh's file has to be named in ~/.zshrc
    "bash": (_DATA, "bash-completion/completions/grpo"),
    "fish": (_CONFIG, "fish/completions/grpo.fish"),
    "zsh": (_DATA, "zsh/grpo-completion.zsh"),
}


def install_completion(command: click.Command) -> None:
    """Writes the completion of `grpo` for the shell that $SHELL names, and says so in a line.

    Raises UserError for another shell, and if the file cannot be written.
    """
    from click.shell_completion import get_completion_class

    from runners.files.durable import save_text

    shell = Path(os.environ.get("SHELL", "")).name
    kind = get_completion_class(shell)
    if kind is None or shell not in _FILES:
        raise UserError(f"SHELL: completions are for bash, fish and zsh, found {show(shell)}")
    (variable, usual), place = _FILES[shell]
    file = Path(os.environ.get(variable) or usual).expanduser() / place
    save_text(file, kind(command, {}, "grpo", "_GRPO_COMPLETE").source())
    then = f"; add to ~/.zshrc: source {file}" if shell == "zsh" else "; new shells read it"
    echo(f"{file}: written{then}")

"""`grpo --install-completion`: Tab completion of commands and options in the shell, made by click."""

from __future__ import annotations

import os
from pathlib import Path

import click

from runners.errors import UserError, show
from runners.machine.terminal import echo

_FILES = {  # by shell: where it looks for completions; zsh's file has to be named in ~/.zshrc
    "bash": ".local/share/bash-completion/completions/grpo",
    "fish": ".config/fish/completions/grpo.fish",
    "zsh": ".local/share/zsh/grpo-completion.zsh",
}


def install_completion(command: click.Command) -> None:
    """Writes the completion script for the shell in $SHELL, and prints its path.

    Raises UserError for any other shell, or if the file cannot be written.
    """
    from click.shell_completion import get_completion_class

    from runners.files.durable import save_text

    shell = Path(os.environ.get("SHELL", "")).name
    kind = get_completion_class(shell) if shell in _FILES else None
    if kind is None:
        raise UserError(f"SHELL: expected bash, fish or zsh, found {show(shell)}")
    file = Path.home() / _FILES[shell]
    save_text(file, kind(command, {}, "grpo", "_GRPO_COMPLETE").source())
    then = f"; add to ~/.zshrc: source {file}" if shell == "zsh" else "; open a new shell to use it"
    echo(f"{file}: written{then}")

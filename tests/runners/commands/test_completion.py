"""`grpo --install-completion` writes a file for the shell, which completes commands and options."""

import shutil
import subprocess

from tests.support.commands import grpo
from tests.support.processes.new_process import python

PLACES = {
    "bash": ".local/share/bash-completion/completions/grpo",
    "fish": ".config/fish/completions/grpo.fish",
    "zsh": ".local/share/zsh/grpo-completion.zsh",
}


def test_the_file_is_where_the_shell_looks(tmp_path):
    """An installed shell can parse the file; an unsupported shell is an error."""
    other = grpo("--install-completion", env={"HOME": str(tmp_path), "SHELL": "/bin/sh"}, code=2)
    assert "bash, fish or zsh" in other.stderr and not any(tmp_path.iterdir())
    for shell, place in PLACES.items():
        done = grpo("--install-completion", env={"HOME": str(tmp_path), "SHELL": f"/bin/{shell}"})
        file = tmp_path / place
        assert done.stdout.startswith(f"{file}: written") and ("~/.zshrc" in done.stdout) == (shell == "zsh")
        assert "_GRPO_COMPLETE" in file.read_text()
        if shutil.which(shell):
            subprocess.run([shell, "-n", str(file)], check=True)


def test_commands_and_options_are_completed(tmp_path):
    """The test sets the same variables as the shell."""
    code = "from runners.cli import main; main(prog_name='grpo')"
    for words, number, wanted in (("grpo ex", 1, "plain,export"), ("grpo export --gg", 2, "plain,--gguf")):
        asked: dict = {"_GRPO_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(number)}
        done = python("-c", code, **asked)
        assert done.stdout.split() == [wanted]

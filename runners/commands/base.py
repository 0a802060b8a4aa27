"""Provides what all commands share: lazy imports, and errors that are shown as one line with an
exit code.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Any

import click

from runners.errors import (
    ConfigError,
    UserError,
    first_line,
    is_out_of_memory,
    one_line,
    shortage,
    system_fault,
)
from runners.machine.metal_faults import ADVICE, is_watchdog
from runners.machine.terminal import OutputLost, drop_output, echo, escape_logs

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
INTERRUPTED = 130  # 128 + SIGINT, as shells count


class LazyGroup(click.Group):
    """A group whose `commands` are names of module attributes. A command is imported only when it
    is shown or run.

    A command's module imports nothing heavy at the top, so the group's help can show the command's
    first line quickly.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the command names, in the order of the table."""
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports and returns the command with this name, or returns None if no command has it."""
        module, _, attribute = str(self.commands.get(cmd_name, "")).partition(":")
        return getattr(importlib.import_module(module), attribute) if module else None


def ends_with_a_line(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a command print a UserError to stderr and exit with its code (2). After Ctrl-C it exits
    with 130 (or with the `exit_code` of the KeyboardInterrupt: 143 after SIGTERM).

    Out-of-memory errors and operating-system errors are treated as user errors. Any other exception
    is a bug and keeps its traceback.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        escape_logs()
        try:
            for stream in (sys.stdout, sys.stderr):
                # an old terminal's encoding may lack some characters
                if isinstance(stream, TextIOWrapper):
                    stream.reconfigure(errors="backslashreplace")
            return function(*args, **kwargs)
        except KeyboardInterrupt as error:
            fault = error
            lines = ["interrupted", getattr(error, "advice", "")]
        except OutputLost as error:
            drop_output(sys.stdout)
            fault = error
            lines = [] if error.is_pipe else [str(error)]  # a pipe's reader may stop reading
        except UserError as error:
            fault = error
            lines = error.problems if isinstance(error, ConfigError) else [str(error)]
        except (OSError, RuntimeError, MemoryError) as error:
            fault = UserError()
            if is_out_of_memory(error):
                lines = [
                    f"{shortage(first_line(error))}; `grpo plan CONFIG` shows how a run uses memory"
                ]
            elif is_watchdog(error):
                lines = [f"{first_line(error)}: {ADVICE}"]
            elif refused := system_fault(error):
                lines = [f"refused by the system: {refused}"]
            else:
                raise
        if not getattr(fault, "reported", False):  # another rank reports it for all
            for line in filter(None, lines):
                echo(one_line(line, os.environ), err=True)
        sys.exit(getattr(fault, "exit_code", INTERRUPTED))

    return run


def refuse(*faults: tuple[object, str]) -> None:
    """Raises UserError with the message of the first fault whose condition holds."""
    for wrong, message in faults:
        if wrong:
            raise UserError(message)


Part = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A decorator that adds an argument or option to a command."""


def option(name: str, meaning: str, kind: Any = None, default: Any = None, **more: Any) -> Part:
    """Returns an option with its help text. If the name ends in =WORD, the option takes a value,
    shown as WORD.
    """
    name, _, word = name.partition("=")
    more |= {} if default is None else {"default": default}
    return click.option(*name.split(" as "), type=kind, help=meaning, metavar=word or None, **more)


def flag(name: str, meaning: str) -> Part:
    """Returns an option without a value."""
    return click.option(*name.split(" as "), is_flag=True, help=meaning)


def command(
    name: str, *parts: Part | Sequence[Part], notes: str = ""
) -> Callable[[Callable[..., Any]], click.Command]:
    """Creates a command from a function and applies `ends_with_a_line`. `parts` are the command's
    arguments, options and groups of options, in order. `notes` are printed below the command's
    help.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        found = ends_with_a_line(function)
        for part in reversed(parts):
            for each in reversed(part) if isinstance(part, Sequence) else (part,):
                found = each(found)
        return click.command(name, context_settings=HELP, epilog=notes)(found)

    return decorate

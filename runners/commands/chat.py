"""`grpo chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from runners.commands.base import INTERRUPTED, command
from runners.commands.options import (
    MODEL,
    PROMPT,
    SAMPLING,
    TRUST,
    open_model,
    resolve_prompt,
    sampling_of,
)
from runners.machine.terminal import echo, echo_output, echo_text

if TYPE_CHECKING:
    from runners.inference.inference_model import InferenceModel
    from runners.inference.text_generation import Conversation

PROMPT_SIGN = ">>> "
_COMMANDS = """\
  /help    show these commands
  /clear   start a new conversation
  /exit    quit (or Ctrl-D)
  Ctrl-C   stop the reply; press it again before the next message to quit
"""


@command(
    "chat",
    click.argument("model"),
    PROMPT,
    SAMPLING,
    MODEL,
    TRUST,
    notes=f"\b\nWhile chatting:\n{_COMMANDS}",
)
def chat_command(model: str, **values: Any) -> None:
    """Chat with a model.

    MODEL is a model folder, a run's folder, a Hub name, a folder with adapters, or "embedded". A model that
    was trained with grpo_fn uses the prompt format of its training, unless options override it. If standard
    input is not a terminal, each line is a message, and only the replies are printed.
    """
    loaded = open_model(model, values)
    values = resolve_prompt(values, loaded.prompt)
    conversation = open_conversation(loaded, values)
    from runners.inference.text_generation import Speed
    from runners.machine.signals import Interrupts

    if sys.stdin.isatty():
        echo(f"Chatting with {model}. /help shows the commands, Ctrl-D quits.", err=True)
    speed = Speed()
    stopped = False  # by Ctrl-C, in the last reply or at the prompt
    while True:
        try:
            message = _read()
        except KeyboardInterrupt:
            echo("", err=True)
            if stopped:
                break
            stopped = True
            echo("Press Ctrl-C again to quit.", err=True)
            continue
        stopped = False
        if message == "/exit":
            break
        if message == "/help":
            echo_text(_COMMANDS, nl=False, err=True)
        elif message == "/clear":
            conversation.clear()
        elif message:
            with Interrupts() as interrupts:
                show_reply(
                    conversation.reply(message, should_stop=lambda: interrupts.stopped, speed=speed)
                )
            stopped = interrupts.stopped
    echo(speed.line(), err=True)
    if stopped:
        sys.exit(INTERRUPTED)


def open_conversation(model: InferenceModel, values: dict[str, Any]) -> Conversation:
    """Starts a conversation with the resolved options."""
    from runners.inference.text_generation import Conversation, generation_key

    return Conversation(
        model,
        sampling_of(values, model),
        key=generation_key(values["seed"]),
        system=values["system"],
        nudge=values["nudge"],
        template_kwargs=values["template_kwargs"],
        raw=values["raw"],
    )


def show_reply(pieces: Iterable[str]) -> None:
    """Streams a reply to standard output, followed by a line break."""
    for piece in pieces:
        echo_output(piece)
    echo()


def _read() -> str:
    """Returns the next message, stripped; "/exit" at the end of the input."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        # With line editing, and this conversation's messages as history.
        with suppress(ImportError):  # not every Python has it; macOS has editline under its name
            import readline  # noqa: F401 (importing it is what turns editing on in `input`)
        with suppress(EOFError):
            return input(PROMPT_SIGN).strip()
        echo("", err=True)
        return "/exit"
    if sys.stdin.isatty():  # replies may go into a file: nothing else may be written there
        echo_text(PROMPT_SIGN, nl=False, err=True)
    line = sys.stdin.readline()
    return line.strip() if line else "/exit"
